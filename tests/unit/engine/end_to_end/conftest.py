"""Every architecture's tiny checkpoint, with the answers of `transformers`, made once."""

from __future__ import annotations

import importlib.util

import pytest

from kvstrata.engine.models.registry import ARCHITECTURES
from kvstrata.testing.tiny_models import Memory, TinyModel

QUICK = ("llama", "qwen3_next")


def _is_there(arch: str) -> bool:
    return importlib.util.find_spec(f"kvstrata.engine.models.{arch}") is not None


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(arch, marks=[] if arch in QUICK else [pytest.mark.slow])
        for arch in filter(_is_there, ARCHITECTURES)
    ],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Each architecture in turn."""
    return TinyModel.make(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """For what does not depend on the architecture."""
    return TinyModel.make("llama", tmp_path_factory.mktemp("only-llama") / "model")


@pytest.fixture
def memory() -> Memory:
    """A connector."""
    return Memory()
