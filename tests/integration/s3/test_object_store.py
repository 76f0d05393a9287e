from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import from_url

from kvstrata.config.schema import ObjectStoreTierConfig
from kvstrata.core.chunk_label import Rank
from kvstrata.errors import ConfigError
from kvstrata.testing.chunks import a_label, a_namespace, content, empty, filled, within
from kvstrata.testing.servers import HOST
from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers.object_store import BucketStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

    from kvstrata.core.chunk_label import Namespace
    from kvstrata.core.ids import ChunkKey
    from kvstrata.testing.servers import ServerProcess

    OpenStore = Callable[[ObjectStoreTierConfig], BucketStore]

BUCKET = "chunks"


class BucketMedium:
    """Objects below one prefix, let go of after each test."""

    def __init__(self, config: ObjectStoreTierConfig, bucket: ObjectStore) -> None:
        self._config = config
        self._bucket = bucket
        self._stores: list[BucketStore] = []

    def open(self, namespace: Namespace, rank: Rank) -> BucketStore:
        self._stores.append(BucketStore(self._config, namespace, rank))
        return self._stores[-1]

    def damage(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        for batch in obstore.list(self._bucket):
            for found in batch:
                if key.hex() in found["path"]:
                    raw = bytes(obstore.get(self._bucket, found["path"]).bytes())
                    obstore.put(self._bucket, found["path"], change(raw))

    def close(self) -> None:
        for store in self._stores:
            store.close()


class TestBucketStoreOverS3(TierContract):
    @pytest.fixture
    def medium(
        self, server: ServerProcess, request: pytest.FixtureRequest
    ) -> Iterator[BucketMedium]:
        config = _config(server, prefix=f"test-{abs(hash(request.node.nodeid))}")
        bucket = _bucket(server, config.url)
        medium = BucketMedium(config, bucket)
        yield medium
        medium.close()


class TestBucketStoreOverAFolder(TierContract):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Iterator[BucketMedium]:
        url = f"file://{tmp_path}/bucket"
        medium = BucketMedium(ObjectStoreTierConfig(url=url), from_url(url, mkdir=True))
        yield medium
        medium.close()


def test_objects_lie_where_their_names_say(server: ServerProcess, open_store: OpenStore) -> None:
    config, label = _config(server, prefix="deep/cache"), a_label(1)
    open_store(config).write([filled(label)], within(10))

    name = label.key.hex()
    bucket = _bucket(server, f"s3://{BUCKET}")
    path = f"deep/cache/{a_namespace().fingerprint}/{name[:2]}/{name}.0of1"
    assert obstore.head(bucket, path)["size"] == 4096 + label.payload_bytes


def test_a_chunk_larger_than_a_part_is_read_whole(
    server: ServerProcess, open_store: OpenStore
) -> None:
    label = a_label(5, payload_bytes=70 * 2**20)
    store, buffer = open_store(_config(server)), empty(label)

    assert store.write([filled(label)], within(15)).done == {label.key}
    assert store.read([buffer], within(15)).done == {label.key}
    assert content(buffer) == content(filled(label))


def test_memory_works_as_a_bucket(open_store: OpenStore) -> None:
    store = open_store(ObjectStoreTierConfig(url="memory:///"))
    label, buffer = a_label(1), empty(a_label(1))

    assert store.write([filled(label)], within(5)).done == {label.key}
    assert store.read([buffer], within(5)).done == {label.key}
    assert content(buffer) == content(filled(label))


def test_an_address_that_makes_no_sense_is_a_config_error() -> None:
    for url in ("s3:///", "nonsense://bucket"):
        with pytest.raises(ConfigError):
            BucketStore(ObjectStoreTierConfig(url=url), a_namespace(), Rank())


def test_two_processes_share_a_bucket(server: ServerProcess, open_store: OpenStore) -> None:
    label, config = a_label(703), _config(server, prefix="shared")
    code = f"""
        import json
        from kvstrata.config.schema import ObjectStoreTierConfig
        from kvstrata.core.chunk_label import Rank
        from kvstrata.testing.chunks import a_label, a_namespace, filled, within
        from kvstrata.tiers.object_store import BucketStore

        config = ObjectStoreTierConfig(url={config.url!r}, endpoint={config.endpoint!r})
        store = BucketStore(config, a_namespace(), Rank())
        outcome = store.write([filled(a_label(703))], within(10))
        print(json.dumps([key.hex() for key in outcome.done]))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, timeout=15
    )
    assert json.loads(process.stdout) == [label.key.hex()]

    buffer = empty(label)
    assert open_store(config).read([buffer], within(10)).done == {label.key}
    assert content(buffer) == content(filled(label))


def _bucket(server: ServerProcess, url: str) -> ObjectStore:
    """The way around the store under test."""
    endpoint = f"http://{HOST}:{server.port}"
    return from_url(url, config={"endpoint": endpoint}, client_options={"allow_http": True})


def _config(server: ServerProcess, *, prefix: str = "cache") -> ObjectStoreTierConfig:
    return ObjectStoreTierConfig(
        url=f"s3://{BUCKET}/{prefix}",
        endpoint=f"http://{HOST}:{server.port}",
        region="us-east-1",
    )
