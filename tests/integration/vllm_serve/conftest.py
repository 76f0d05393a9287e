"""vLLM's API server (CPU build) in processes of its own, on a tiny checkpoint."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.testing.vllm_checkpoints import make_checkpoint
from kvstrata.testing.vllm_exam import Exam
from kvstrata.testing.vllm_server import VllmServer, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder = tmp_path_factory.mktemp("models") / "gemma3"
    make_checkpoint("gemma3", folder)
    return folder


@pytest.fixture(scope="session")
def exam(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Exam:
    chooser = random.Random(1)  # noqa: S311 - not a secret
    prompts = [[chooser.randrange(3, 256) for _ in range(1500 + n)] for n in range(8)]
    plain = VllmServer(model, tmp_path_factory.mktemp("plain") / "log")
    with running(plain):
        return Exam.of(plain, prompts)


@pytest.fixture
def make_server(model: Path, tmp_path: Path) -> Callable[..., VllmServer]:
    """Makes servers with the connector, not started; their tiers, and options of vLLM's."""

    def make(
        name: str, *tiers: dict[str, Any], options: tuple[str, ...] = (), **changes: object
    ) -> VllmServer:
        settings = {
            "host": {"capacity": "256MiB"},
            "tiers": list(tiers),
            "load": {"decide": "always", "deadline": "10s"},
            **changes,
        }
        return VllmServer(model, tmp_path / f"{name}.log", settings, options=options)

    return make


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """A tier in a directory."""
    return {"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}
