"""Looking at buckets and servers: the same checks on the same bytes."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from obstore.store import from_url
from redis import Redis

from kvstrata.config.schema import ObjectStoreTierConfig, ValkeyTierConfig
from kvstrata.core.chunk_label import Rank
from kvstrata.core.layout import GroupKind
from kvstrata.errors import ConfigError, TierUnavailable
from kvstrata.operations.inspection import inspect
from kvstrata.operations.listing import Totals
from kvstrata.operations.opening import open_listing
from kvstrata.operations.verification import fix, verify
from kvstrata.testing.chunks import a_label, a_namespace, filled, within
from kvstrata.testing.servers import HOST, free_port, redis_cluster, redis_server, s3_server
from kvstrata.tiers.object_store import BucketStore
from kvstrata.tiers.valkey import ValkeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstrata.interfaces import ChunkStore
    from kvstrata.operations.listing import StoreListing

BAD = a_label(2).key.hex()
SECRET = "secret"  # noqa: S105 - the test server's


def write(store: ChunkStore) -> None:
    with closing(store):
        assert len(store.write([filled(a_label(n)) for n in (1, 2, 3)], within(30)).done) == 3


def look(listing: StoreListing) -> None:
    found = inspect(listing)
    (namespace,) = found.namespaces
    assert namespace.fingerprint == a_namespace().fingerprint
    assert (namespace.num_chunks, namespace.num_complete) == (3, 3)
    assert namespace.files == Totals(3, 3 * 14_096)
    assert namespace.groups[0].kind is GroupKind.FULL
    assert verify(listing).is_clean


def mend(listing: StoreListing, moved_to: str) -> None:
    """One chunk was damaged: it is found, taken away, and the rest is clean."""
    found = fix(listing, verify(listing))
    (finding,) = found.findings
    assert finding.reason == "payload does not match its checksum"
    assert finding.moved_to == moved_to
    again = verify(listing)
    assert again.is_clean
    assert again.num_files == 2


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with s3_server(tmp_path, "chunks") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{server.port}")
        yield "s3://chunks/a/cache"


def test_a_bucket_is_inspected_verified_and_fixed(s3: str) -> None:
    config = ObjectStoreTierConfig(url=s3, endpoint=os.environ["AWS_ENDPOINT_URL"])
    write(BucketStore(config, a_namespace(), Rank()))
    bucket = from_url(s3)
    bucket.put("notes/other", b"no chunk")
    bucket.put(f"{a_namespace().fingerprint}/notes", b"no chunk")
    listing = open_listing(s3)
    look(listing)

    name = f"{a_namespace().fingerprint}/{BAD[:2]}/{BAD}.0of1"
    bucket.put(name, flipped(bytes(bucket.get(name).bytes())))

    mend(listing, f"quarantine/{BAD}.0of1")
    assert listing.housekeeping().quarantined == Totals(1, 14_096)
    bucket.put(name, b"short")
    assert verify(listing).findings[0].reason == "header page of 5 bytes instead of 4096"


def test_a_bucket_without_chunks_is_no_store(s3: str) -> None:
    from_url(s3).put("notes/other", b"x")
    with pytest.raises(ConfigError, match="no kvstrata store"):
        open_listing(s3)


def test_a_bucket_that_is_not_there_cannot_be_looked_at(s3: str) -> None:
    with pytest.raises(TierUnavailable, match="s3://missing"):
        open_listing(s3.replace("chunks", "missing"))


def test_a_server_is_inspected_verified_and_fixed(tmp_path: Path) -> None:
    with redis_server(tmp_path, password=SECRET) as server:
        address = f"valkey://:{SECRET}@{HOST}:{server.port}"
        write(ValkeyStore(ValkeyTierConfig(url=address), a_namespace(), Rank()))
        with (
            closing(open_listing(address)) as listing,
            Redis(HOST, server.port, password=SECRET) as client,
        ):
            client.set("kvstrata:other", b"no chunk")
            assert SECRET not in listing.address
            look(listing)
            (name,) = client.keys(f"*{BAD}*")
            client.set(name, flipped(client.get(name)))
            mend(listing, "deleted")


def test_a_cluster_is_recognised(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as servers:
        address = f"valkey://{HOST}:{servers[0].port}"
        write(ValkeyStore(ValkeyTierConfig(url=address, cluster=True), a_namespace(), Rank()))
        with closing(open_listing(address)) as listing:
            look(listing)


def test_a_server_without_chunks_is_no_store(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as server,
        pytest.raises(ConfigError, match="no kvstrata store"),
    ):
        open_listing(f"redis://{HOST}:{server.port}")


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(TierUnavailable, match="ConnectionError") as caught:
        open_listing(f"valkey://:{SECRET}@{HOST}:{free_port()}")
    assert SECRET not in str(caught.value)


def test_an_address_that_cannot_be_read_keeps_its_password() -> None:
    with pytest.raises(ConfigError, match="no address") as caught:
        open_listing("valkey://:sec/ret@host:port")
    assert "sec" not in str(caught.value)
