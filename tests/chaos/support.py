"""How long to go on, and media whose raw bytes a test can reach behind the store's back."""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Final, Protocol

import obstore
from obstore.store import from_url
from redis import Redis

from kvstrata.config.schema import FilesystemTierConfig, ObjectStoreTierConfig, ValkeyTierConfig
from kvstrata.config.units import ByteSize, Duration
from kvstrata.core.chunk_label import Rank
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.servers import HOST
from kvstrata.tiers.file_layout import StoreDirectory
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.object_store import BucketStore
from kvstrata.tiers.valkey import ValkeyStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.core.chunk_label import Namespace
    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import ChunkStore
    from kvstrata.testing.servers import ServerProcess

IS_FULL: Final = os.environ.get("KVSTRATA_CHAOS", "short") == "full"
SEED: Final = int(os.environ.get("KVSTRATA_CHAOS_SEED", "20"))
BUCKET: Final = "chunks"


def rounds(*, short: int, full: int) -> int:
    """How often to do something, as the environment says."""
    return full if IS_FULL else short


def a_generator(name: str) -> random.Random:
    """Each test's own source of randomness, the same in every run with one seed."""
    return random.Random(f"{SEED} {name}")  # noqa: S311 - repeatable on purpose


def directory_store(
    path: Path, namespace: Namespace | None = None, quota_bytes: int | None = None
) -> FilesystemStore:
    quota = None if quota_bytes is None else ByteSize(quota_bytes)
    config = FilesystemTierConfig(
        path=str(path), durability="none", quota=quota, min_free=ByteSize(0)
    )
    return FilesystemStore(config, namespace or a_namespace(), Rank())


def valkey_store(server: ServerProcess, namespace: Namespace | None = None) -> ValkeyStore:
    config = ValkeyTierConfig(url=f"valkey://{HOST}:{server.port}")
    return ValkeyStore(config, namespace or a_namespace(), Rank())


def bucket_store(server: ServerProcess, namespace: Namespace | None = None) -> BucketStore:
    config = ObjectStoreTierConfig(
        url=f"s3://{BUCKET}/cache",
        endpoint=f"http://{HOST}:{server.port}",
        region="us-east-1",
        timeout=Duration(5),
    )
    return BucketStore(config, namespace or a_namespace(), Rank())


class RawMedium(Protocol):
    """A place for chunks, from both sides."""

    def open(self, namespace: Namespace) -> ChunkStore: ...

    def get(self, namespace: Namespace, key: ChunkKey) -> bytes: ...

    def put(self, namespace: Namespace, key: ChunkKey, raw: bytes | None) -> None:
        """Replace a chunk's raw bytes; None: take it away."""


class RawDirectory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, namespace: Namespace) -> ChunkStore:
        return directory_store(self._path, namespace)

    def path(self, namespace: Namespace, key: ChunkKey) -> Path:
        return StoreDirectory(self._path).chunk(namespace, key, Rank())

    def get(self, namespace: Namespace, key: ChunkKey) -> bytes:
        return self.path(namespace, key).read_bytes()

    def put(self, namespace: Namespace, key: ChunkKey, raw: bytes | None) -> None:
        path = self.path(namespace, key)
        if raw is None:
            path.unlink()
        else:
            path.write_bytes(raw)


class RawValkey:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._client = Redis(HOST, server.port)

    def open(self, namespace: Namespace) -> ChunkStore:
        return valkey_store(self._server, namespace)

    def get(self, namespace: Namespace, key: ChunkKey) -> bytes:
        raw = self._client.get(self._name(namespace, key))
        assert isinstance(raw, bytes)
        return raw

    def put(self, namespace: Namespace, key: ChunkKey, raw: bytes | None) -> None:
        name = self._name(namespace, key)
        if raw is None:
            self._client.delete(name)
        else:
            self._client.set(name, raw)

    def close(self) -> None:
        self._client.close()

    @staticmethod
    def _name(namespace: Namespace, key: ChunkKey) -> str:
        return f"kvstrata:{namespace.fingerprint}:{{{key.hex()}}}:0of1"


class RawBucket:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._bucket = from_url(
            f"s3://{BUCKET}/cache",
            config={"endpoint": f"http://{HOST}:{server.port}", "region": "us-east-1"},
            client_options={"allow_http": True},
        )

    def open(self, namespace: Namespace) -> ChunkStore:
        return bucket_store(self._server, namespace)

    def get(self, namespace: Namespace, key: ChunkKey) -> bytes:
        return bytes(obstore.get(self._bucket, self._name(namespace, key)).bytes())

    def put(self, namespace: Namespace, key: ChunkKey, raw: bytes | None) -> None:
        name = self._name(namespace, key)
        if raw is None:
            obstore.delete(self._bucket, name)
        else:
            obstore.put(self._bucket, name, raw)

    @staticmethod
    def _name(namespace: Namespace, key: ChunkKey) -> str:
        return f"{namespace.fingerprint}/{key.hex()[:2]}/{key.hex()}.0of1"
