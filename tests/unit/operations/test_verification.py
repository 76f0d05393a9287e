"""Verification finds every kind of damage, and moves what is bad only when asked to."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import Rank
from kvstrata.operations.directory_listing import DirectoryListing
from kvstrata.operations.verification import Verdict, fix, verify
from kvstrata.testing.chunks import a_label, a_namespace

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvstrata.operations.listing import Place
    from kvstrata.operations.verification import Verification

    from .conftest import MadeStore


def check(store: MadeStore) -> Verification:
    return verify(DirectoryListing(store.root))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def reasons(found: Verification) -> list[str]:
    return [finding.reason for finding in found.findings]


def test_a_healthy_store_is_clean(store: MadeStore) -> None:
    store.write(1, 2, weights="others", rank=Rank(1, 4))

    found = check(store)

    assert found.is_clean
    assert (found.num_files, found.num_bytes) == (5, 5 * 14_096)


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "no chunk: the magic bytes are missing"),
        (8, "format version 0, this reader knows 1"),
        (10, "damaged header"),
        (14, "damaged header"),
        (40, "damaged header"),
        (4095, "bytes behind the header"),
        (4096, "payload does not match its checksum"),
        (14_095, "payload does not match its checksum"),
    ],
)
def test_one_flipped_bit_is_found(store: MadeStore, offset: int, reason: str) -> None:
    flip(store.path(2), offset)

    found = check(store)

    assert reasons(found) == [reason]
    assert found.findings[0].verdict is Verdict.BAD
    assert found.findings[0].place.name == str(store.path(2).relative_to(store.root))


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "header page of 0 bytes instead of 4096"),
        (100, "header page of 100 bytes instead of 4096"),
        (4096, "payload of 0 bytes instead of 10000"),
        (14_095, "payload of 9999 bytes instead of 10000"),
        (14_097, "payload of 10001 bytes instead of 10000"),
    ],
)
def test_a_wrong_size_is_found(store: MadeStore, size: int, reason: str) -> None:
    os.truncate(store.path(1), size)
    assert reasons(check(store)) == [reason]


def test_swapped_files_are_found(store: MadeStore) -> None:
    one, two = store.path(1), store.path(2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)

    found = reasons(check(store))

    keys = [a_label(1).key.hex(), a_label(2).key.hex()]
    assert sorted(found) == sorted(
        f"header says key {said}, its place {there}" for said, there in [keys, keys[::-1]]
    )


def test_a_file_of_another_namespace_is_found(store: MadeStore) -> None:
    store.write(4, weights="others")
    source = store.path(4, "others")
    shutil.copy(source, store.path(1).parents[1] / source.parent.name)

    ours, others = a_namespace().fingerprint, a_namespace("others").fingerprint
    assert reasons(check(store)) == [f"header says namespace {others}, its place {ours}"]


def test_a_file_of_another_rank_is_found(store: MadeStore) -> None:
    path = store.path(1)
    path.rename(path.with_suffix(".1of2"))
    assert reasons(check(store)) == ["header says rank 0, its place 1"]


def test_what_no_reader_would_look_for_is_found(store: MadeStore) -> None:
    path = store.path(1)
    path.rename(path.with_suffix(".bak"))
    other = next(f for f in path.parents[1].iterdir() if f != path.parent)
    store.path(2).rename(other / store.path(2).name)

    assert reasons(check(store)) == ["its name or folder is no chunk's"] * 2


def test_links_pipes_and_folders_are_no_chunks(store: MadeStore) -> None:
    one, two, three = (store.path(number) for number in (1, 2, 3))
    target = store.root / "target"
    one.rename(target)
    one.symlink_to(target)
    two.unlink()
    os.mkfifo(two)
    three.unlink()
    three.mkdir()

    found = check(store)

    assert sorted(reasons(found)) == [
        "a link, no regular file", "no regular file", "no regular file",
    ]  # fmt: skip
    after = fix(DirectoryListing(store.root), found)
    assert [f.moved_to is None for f in after.findings if f.place.name.endswith(three.name)] == [
        True
    ]
    assert three.is_dir()
    assert target.exists()


def test_files_being_written_are_left_alone(store: MadeStore) -> None:
    (store.path(1).parent / ".host-1-1.tmp").write_bytes(b"half")
    assert check(store).is_clean


def test_fixing_moves_the_bad_and_only_them(store: MadeStore) -> None:
    flip(store.path(2), 5000)
    bad, before = store.path(2), store.files()

    listing = DirectoryListing(store.root)
    after = fix(listing, verify(listing))

    moved = store.root / "quarantine" / bad.name
    assert after.findings[0].moved_to == f"quarantine/{bad.name}"
    assert store.files() == before - {bad} | {moved}
    assert check(store).is_clean


def test_verifying_alone_moves_nothing(store: MadeStore) -> None:
    flip(store.path(2), 5000)
    before = store.files()

    check(store)

    assert store.files() == before


def test_fixing_makes_a_missing_quarantine(store: MadeStore) -> None:
    flip(store.path(2), 5000)
    (store.root / "quarantine").rmdir()

    listing = DirectoryListing(store.root)
    fix(listing, verify(listing))

    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_fixing_corrects_the_counter(store: MadeStore) -> None:
    store.path(1).unlink()

    listing = DirectoryListing(store.root)
    assert fix(listing, verify(listing)).is_clean

    usage = listing.housekeeping().usage
    assert usage is not None
    assert (usage.counted_bytes, usage.drift_bytes) == (2 * 14_096, 0)


def test_a_chunk_that_was_replaced_meanwhile_is_not_moved(store: MadeStore) -> None:
    good = store.path(2).read_bytes()
    flip(store.path(2), 5000)
    listing = DirectoryListing(store.root)
    found = verify(listing)
    store.path(2).write_bytes(good)

    after = fix(listing, found)

    assert after.findings[0].moved_to is None
    assert store.path(2).read_bytes() == good


class FaultyListing(DirectoryListing):
    """Some files cannot be read, as on a disk that fails or with other users' files."""

    def __init__(self, root: Path, faults: dict[str, OSError]) -> None:
        super().__init__(root)
        self._faults = faults

    def read(self, place: Place, most_bytes: int | None = None) -> Generator[memoryview]:
        for name, fault in self._faults.items():
            if place.name.endswith(name):
                raise fault
        yield from super().read(place, most_bytes)


def test_an_unreadable_file_is_named_and_never_moved(store: MadeStore) -> None:
    faults: dict[str, OSError] = {
        store.path(1).name: PermissionError(13, "Permission denied"),
        store.path(2).name: FileNotFoundError(2, "evicted meanwhile"),
    }
    listing = FaultyListing(store.root, faults)

    found = fix(listing, verify(listing))

    assert reasons(found) == ["cannot be read: Permission denied"]
    assert found.findings[0].verdict is Verdict.UNREADABLE
    assert found.findings[0].moved_to is None
    assert store.path(1).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_and_folders_without_permission_are_unreadable(store: MadeStore) -> None:
    store.path(1).chmod(0)
    folder = store.path(2).parent
    folder.chmod(0)

    found = check(store)

    folder.chmod(0o700)
    assert reasons(found) == ["cannot be read: Permission denied"] * 2


def test_progress_ends_at_the_total(store: MadeStore) -> None:
    seen: list[tuple[int, int | None]] = []

    verify(DirectoryListing(store.root), lambda done, total: seen.append((done, total)))

    assert seen[-1] == (3 * 14_096, 3 * 14_096)
    assert seen == sorted(seen)


def test_an_interrupt_stops_the_workers(store: MadeStore) -> None:
    store.write(*range(10, 60))
    seen: list[int] = []

    def interrupt(done: int, _: int | None) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        verify(DirectoryListing(store.root), interrupt)
    assert len(seen) <= 8
