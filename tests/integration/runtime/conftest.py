"""Tiny models, made once, and the tiers that engines keep their chunks in."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstrata.engine.tiny import make_tiny
from kvstrata.testing.servers import HOST, redis_server, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstrata.testing.servers import ServerProcess

    Models = Callable[[str], Path]
    Tiers = Callable[[str], dict[str, Any] | None]

BUCKET = "chunks"
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores cost more than they give to tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes each architecture's tiny checkpoint when it is first wanted."""
    folders: dict[str, Path] = {}

    def made(arch: str) -> Path:
        if arch not in folders:
            folders[arch] = tmp_path_factory.mktemp(arch) / "model"
            make_tiny(arch, folders[arch])
        return folders[arch]

    return made


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with s3_server(tmp_path_factory.mktemp("s3"), BUCKET) as server:
        yield server


@pytest.fixture
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    """An empty tier of a kind, to be written into a configuration; None for host memory."""

    def made(kind: str) -> dict[str, Any] | None:
        if kind == "filesystem":
            return {"kind": kind, "path": str(tmp_path / "store"), "min_free": "0B"}
        if kind == "valkey":
            port = request.getfixturevalue("redis").port
            return {"kind": kind, "url": f"valkey://{HOST}:{port}/{next(_numbers) % 16}"}
        if kind == "object_store":
            port = request.getfixturevalue("s3").port
            url = f"s3://{BUCKET}/test-{next(_numbers)}"
            return {"kind": kind, "url": url, "endpoint": f"http://{HOST}:{port}", "region": "x"}
        assert kind == "host"
        return None

    return made
