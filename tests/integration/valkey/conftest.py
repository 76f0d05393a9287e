from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest
from redis import Redis

from kvstrata.config.schema import ValkeyTierConfig
from kvstrata.config.units import Duration
from kvstrata.core.chunk_label import Rank
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.servers import HOST, redis_cluster, redis_server
from kvstrata.tiers.valkey import ValkeyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstrata.core.chunk_label import Namespace
    from kvstrata.core.ids import ChunkKey
    from kvstrata.testing.servers import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with redis_server(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as processes:
        yield processes


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may harm."""
    with redis_server(tmp_path) as process:
        yield process


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """A cluster that a test may harm."""
    with redis_cluster(tmp_path) as processes:
        yield processes


class OpenStore(Protocol):
    def __call__(
        self, url: str, *, cluster: bool = False, timeout_s: float = 2, ttl_s: float | None = None
    ) -> ValkeyStore: ...


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    stores: list[ValkeyStore] = []

    def opened(
        url: str, *, cluster: bool = False, timeout_s: float = 2, ttl_s: float | None = None
    ) -> ValkeyStore:
        ttl = None if ttl_s is None else Duration(ttl_s)
        config = ValkeyTierConfig(url=url, cluster=cluster, timeout=Duration(timeout_s), ttl=ttl)
        stores.append(ValkeyStore(config, a_namespace(), Rank()))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


class ValkeyMedium:
    """Values in some servers, emptied before and let go of after each test."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        is_cluster = len(servers) > 1
        self._config = ValkeyTierConfig(
            url=f"valkey://{HOST}:{servers[0].port}", cluster=is_cluster
        )
        self._clients = [Redis(HOST, server.port) for server in servers]
        self._stores: list[ValkeyStore] = []
        for client in self._clients:
            client.flushall()

    def open(self, namespace: Namespace, rank: Rank) -> ValkeyStore:
        self._stores.append(ValkeyStore(self._config, namespace, rank))
        return self._stores[-1]

    def damage(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        for client in self._clients:
            for name in client.keys(f"*{key.hex()}*"):
                raw = client.get(name)
                assert isinstance(raw, bytes)
                client.set(name, change(raw))

    def close(self) -> None:
        for store in self._stores:
            store.close()
        for client in self._clients:
            client.close()


@pytest.fixture
def medium(server: ServerProcess) -> Iterator[ValkeyMedium]:
    medium = ValkeyMedium([server])
    yield medium
    medium.close()


@pytest.fixture
def cluster_medium(cluster: list[ServerProcess]) -> Iterator[ValkeyMedium]:
    medium = ValkeyMedium(cluster)
    yield medium
    medium.close()
