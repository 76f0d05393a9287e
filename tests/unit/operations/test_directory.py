"""What a scan of a directory sees, and what looking leaves behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import Rank
from kvstrata.core.layout import GroupKind
from kvstrata.errors import ConfigError, TierUnavailable
from kvstrata.operations.directory_listing import DirectoryListing
from kvstrata.operations.inspection import inspect
from kvstrata.operations.listing import Totals, chunk_at
from kvstrata.operations.opening import directory_path, open_listing
from kvstrata.operations.verification import verify
from kvstrata.testing.chunks import a_label, a_namespace

if TYPE_CHECKING:
    from kvstrata.operations.inspection import Inspection

    from .conftest import MadeStore

CHUNK_BYTES = 4096 + 10_000


def look(store: MadeStore) -> Inspection:
    return inspect(DirectoryListing(store.root))


def test_a_healthy_store_is_described(store: MadeStore) -> None:
    found = look(store)

    (namespace,) = found.namespaces
    (group,) = namespace.groups
    assert namespace.fingerprint == a_namespace().fingerprint
    assert namespace.files == Totals(3, 3 * CHUNK_BYTES)
    assert (namespace.num_chunks, namespace.num_complete) == (3, 3)
    assert namespace.ranks == (Rank(),)
    assert (group.group_id, group.kind) == (0, GroupKind.FULL)
    assert (group.block_tokens, group.chunk_tokens) == (16, 64)
    assert found.total_bytes == 3 * CHUNK_BYTES
    assert found.housekeeping.usage is not None
    assert found.housekeeping.usage.drift_bytes == 0


def test_namespaces_and_ranks_are_told_apart(store: MadeStore) -> None:
    store.write(1, 2, weights="others", rank=Rank(0, 2))
    store.write(1, weights="others", rank=Rank(1, 2))

    by_name = {n.fingerprint: n for n in look(store).namespaces}

    others = by_name[a_namespace("others").fingerprint]
    assert len(by_name) == 2
    assert (others.num_chunks, others.num_complete) == (2, 1)
    assert others.ranks == (Rank(0, 2), Rank(1, 2))


def test_oldest_and_newest_use_are_the_access_times(store: MadeStore) -> None:
    for number in (1, 2, 3):
        os.utime(store.path(number), ns=(number * 10**9, 5))

    (namespace,) = look(store).namespaces

    assert (namespace.oldest_use_ns, namespace.newest_use_ns) == (10**9, 3 * 10**9)


def test_leftovers_quarantine_and_strays_are_counted_apart(store: MadeStore) -> None:
    folder = store.path(1).parent
    old, running = folder / ".elsewhere-1-1.tmp", folder / ".elsewhere-1-2.tmp"
    old.write_bytes(b"x" * 10)
    os.utime(old, (0, 0))
    running.write_bytes(b"x" * 20)
    (store.root / "quarantine" / "bad").write_bytes(b"x" * 30)
    (folder / "notes").write_bytes(b"x" * 40)

    found = look(store)

    assert found.housekeeping.temporary == Totals(2, 30)
    assert found.housekeeping.leftovers == Totals(1, 10)
    assert found.housekeeping.quarantined == Totals(1, 30)
    assert found.strays == Totals(1, 40)
    assert found.total_bytes == 3 * CHUNK_BYTES + 100
    assert found.housekeeping.usage is not None
    assert found.housekeeping.usage.drift_bytes == -100


def test_a_kind_is_found_although_some_headers_are_bad(store: MadeStore) -> None:
    store.path(1).write_bytes(b"")
    store.path(2).write_bytes(b"\0" * 5000)

    (namespace,) = look(store).namespaces

    assert namespace.groups[0].kind is GroupKind.FULL


def test_looking_and_verifying_change_nothing(store: MadeStore) -> None:
    # An access time before the modification: the system would note any ordinary reading.
    for path in store.files():
        os.utime(path, ns=(10**9, 2 * 10**9))
    before = {path: path.stat().st_atime_ns for path in store.root.glob("namespaces/*/*/*")}

    listing = DirectoryListing(store.root)
    inspect(listing)
    assert verify(listing).is_clean

    assert {path: path.stat().st_atime_ns for path in before} == before
    assert len(before) == 3


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", "no json", '{"kvstrata": "x', '"kvstrata"']
)
def test_another_directory_is_no_store_and_stays_as_it_was(
    tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a").write_text("a")
    if content is not None:
        (tmp_path / "store.json").write_text(content)
    for path in [*tmp_path.rglob("*"), tmp_path]:
        os.utime(path, ns=(10**9, 2 * 10**9))
    before = os.stat(tmp_path), os.stat(tmp_path / "photos")  # noqa: PTH116
    manifest = (tmp_path / "store.json").stat() if content is not None else None

    with pytest.raises(ConfigError, match="no kvstrata store"):
        open_listing(str(tmp_path))

    if manifest is not None:
        assert (tmp_path / "store.json").stat() == manifest
    assert (os.stat(tmp_path), os.stat(tmp_path / "photos")) == before  # noqa: PTH116


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"kvstrata": 99}')
    with pytest.raises(ConfigError, match="a store of format 99; accepted: a store of format 1"):
        open_listing(str(tmp_path))


def test_a_pipe_for_a_manifest_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.json")
    with pytest.raises(ConfigError, match="no kvstrata store"):
        open_listing(str(tmp_path))


def test_a_missing_directory_and_a_file_are_no_stores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        open_listing(str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        open_listing(str(tmp_path / "file"))
    assert not (tmp_path / "missing").exists()


def test_a_store_that_may_not_be_listed_is_a_fault(store: MadeStore) -> None:
    (store.root / "namespaces").rename(store.root / "elsewhere")
    (store.root / "namespaces").write_text("")
    with pytest.raises(TierUnavailable, match="cannot be listed: Not a directory"):
        look(store)


def test_file_addresses_are_paths() -> None:
    assert directory_path("file:///srv/a%20b") == Path("/srv/a b")
    assert directory_path("srv/a%20b") == Path("srv/a%20b")


@pytest.mark.parametrize("address", ["ftp://host/x", "file://host/x", "memory://x", ""])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="accepted: a directory"):
        open_listing(address)


def test_a_name_counts_only_as_readers_spell_it() -> None:
    key = a_label(1).key.hex()

    assert chunk_at(key[:2], f"{key}.0of1") is not None
    assert chunk_at("zz", f"{key}.0of1") is None
    assert chunk_at(key[:2], f"{key.upper()}.0of1") is None
    assert chunk_at(key[:2], f"{key}.+0of1") is None
    assert chunk_at(key[:2], f"{key}.1of1") is None
    assert chunk_at(key[:2], f"{key}.0of1.bak") is None
