from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.config.units import ByteSize
from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
from kvstrata.errors import ChunkCorrupt, ConfigError, TierFull, TierUnavailable
from kvstrata.testing.chunks import a_label, a_namespace, content, empty, filled, within
from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers import file_io
from kvstrata.tiers.disk_budget import DiskBudget, Limits
from kvstrata.tiers.file_layout import StoreDirectory, temporary_path
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.janitor import evict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstrata.core.ids import ChunkKey
    from kvstrata.tiers.file_io import FileCalls

pytestmark = pytest.mark.usefixtures("file_calls")


class Directory:
    """One directory that several stores share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[FilesystemStore] = []

    def open(self, namespace: Namespace, rank: Rank) -> FilesystemStore:
        config = FilesystemTierConfig(path=str(self.path), durability="none")
        self.opened.append(FilesystemStore(config, namespace, rank))
        return self.opened[-1]

    def damage(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        (path,) = self.path.glob(f"namespaces/*/*/{key.hex()}.*")
        path.write_bytes(change(path.read_bytes()))


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "store")
    yield directory
    for store in directory.opened:
        store.close()


class TestFilesystemStore(TierContract):
    """The contract, on real files."""


def make(path: Path, **settings: Any) -> FilesystemStore:  # noqa: ANN401 - any setting
    config = FilesystemTierConfig(path=str(path), **settings)
    return FilesystemStore(config, a_namespace(), Rank())


def a_budget(path: Path) -> DiskBudget:
    """The counters of a new store, which is empty, but not by them: a first count shows."""
    StoreDirectory(path).prepare()
    budget = DiskBudget(path / "usage", Limits())
    budget.reserve(10**9)
    return budget


def sizes(path: Path) -> int:
    """The bytes of all chunk files; the janitor may remove some while they are counted."""
    total = 0
    for file in path.glob("namespaces/*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_every_durability_keeps_the_bytes(tmp_path: Path, durability: str) -> None:
    store = make(tmp_path / "store", durability=durability)
    label = a_label(1, payload_bytes=100_001)
    assert store.write([filled(label)], within(10)).done == {label.key}

    buffer = empty(label)
    assert store.read([buffer], within(10)).done == {label.key}
    assert content(buffer) == content(filled(label))
    store.close()


def test_parts_that_lie_on_no_page_are_moved_all_the_same(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    label = a_label(1, payload_bytes=9_000)
    memory = memoryview(bytearray(9_001))
    odd = ChunkBuffer(label, (memory[1:5_000], memory[5_000:]))
    memory[1:] = content(filled(label))

    assert store.write([odd], within(10)).done == {label.key}
    memory[:] = bytes(9_001)
    assert store.read([odd], within(10)).done == {label.key}
    assert bytes(memory[1:]) == content(filled(label))
    store.close()


def test_folders_are_private_and_nothing_temporary_remains(tmp_path: Path) -> None:
    path = tmp_path / "a" / "store"
    store = make(path)
    store.write([filled(a_label(n)) for n in range(5)], within(10))

    folders = [path, *(p for p in path.rglob("*") if p.is_dir())]
    assert {oct(p.stat().st_mode & 0o777) for p in folders} == {"0o700"}
    assert not list(path.rglob("*.tmp"))
    store.close()


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")

    with pytest.raises(ConfigError, match="holds files that are no kvstrata store"):
        make(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.doc"]


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"kvstrata": 99}')

    with pytest.raises(ConfigError, match="a store of another format"):
        make(tmp_path)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be used"):
        make(tmp_path / "file" / "store")


def test_a_corrupt_chunk_goes_into_quarantine_once(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    label = a_label(1)
    store.write([filled(label)], within(10))
    Directory(tmp_path / "store").damage(label.key, lambda raw: raw[:-1])

    assert isinstance(store.read([empty(label)], within(10)).failed[label.key], ChunkCorrupt)
    assert store.read([empty(label)], within(10)).absent == {label.key}
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 1
    store.close()


def test_a_full_store_refuses_and_then_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "store"
    quota = 20 * (4096 + 10_000)
    store = make(path, quota=ByteSize(quota), min_free=ByteSize(0), durability="none")
    refused = 0
    for number in range(200):
        chunk = filled(a_label(number))
        outcome = store.write([chunk], within(10))
        refused += len(outcome.failed)
        assert all(isinstance(error, TierFull) for error in outcome.failed.values())
        assert sizes(path) <= quota + 4096 + 10_000, "one chunk per writer"
        if outcome.failed:
            wait_until(lambda chunk=chunk: bool(store.write([chunk], within(10)).done))  # type: ignore[misc]

    assert 0 < refused < 200
    store.close()


def test_what_was_used_last_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path, min_free=ByteSize(0), durability="none")
    labels = [a_label(n) for n in range(20)]
    store.write([filled(label) for label in labels], within(10))
    for age, label in enumerate(reversed(labels), start=1):
        (file,) = path.glob(f"namespaces/*/*/{label.key.hex()}.*")
        os.utime(file, (time.time() - age, time.time() - age))
    store.read([empty(label) for label in labels[:5]], within(10))
    directory = StoreDirectory(path)
    budget = DiskBudget(directory.usage, Limits(quota_bytes=10 * (4096 + 10_000)))

    assert evict(directory, budget, 1.0) == 10
    kept = store.find([label.key for label in labels], within(10)).done
    assert {label.key for label in labels[:5]} <= kept
    assert kept == {label.key for label in [*labels[:5], *labels[15:]]}
    store.close()


def test_leftovers_of_dead_writers_are_collected_and_the_count_put_right(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path, durability="none")
    store.write([filled(a_label(1))], within(10))
    store.close()
    folder = next(path.glob("namespaces/*/*"))
    alive, dead, new = (Path(temporary_path(folder)) for _ in range(3))
    for file in (alive, dead, new):
        file.write_bytes(bytes(1000))
    for file in (alive, dead):
        os.utime(file, (time.time() - 60, time.time() - 60))
    DiskBudget(path / "usage", Limits()).reserve(10**9)

    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = make(path)
        budget = DiskBudget(path / "usage", Limits())
        wait_until(lambda: budget.usage().used_bytes == 4096 + 10_000 + 2000)

        assert alive.exists(), "its writer holds its lock"
        assert new.exists(), "its writer may be about to lock it"
        assert not dead.exists()
    second.close()


def test_leftovers_are_collected_before_anything_is_evicted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path, min_free=ByteSize(0), durability="none")
    store.write([filled(a_label(n)) for n in range(5)], within(10))
    folder = next(path.glob("namespaces/*/*"))
    for _ in range(9):
        leftover = Path(temporary_path(folder))
        leftover.write_bytes(bytes(100_000))
        os.utime(leftover, (time.time() - 60, time.time() - 60))
    directory = StoreDirectory(path)

    evicted = evict(directory, DiskBudget(directory.usage, Limits(quota_bytes=100_000)), 1.0)

    assert evicted == 0, "what the dead writers left was enough"
    assert not list(path.rglob("*.tmp"))
    store.close()


def test_a_file_that_cannot_be_deleted_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path, min_free=ByteSize(0), durability="none")
    store.write([filled(a_label(n)) for n in range(5)], within(10))
    (oldest,) = path.glob(f"namespaces/*/*/{a_label(0).key.hex()}.*")
    os.utime(oldest, (0, 0))
    subprocess.run(["/usr/bin/chattr", "+i", str(oldest)], check=True)
    directory = StoreDirectory(path)
    try:
        count = evict(directory, DiskBudget(directory.usage, Limits(quota_bytes=30_000)), 1.0)
    finally:
        subprocess.run(["/usr/bin/chattr", "-i", str(oldest)], check=True)

    assert count == 3
    assert oldest.exists()
    store.close()


def test_many_processes_may_make_a_store_at_the_same_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from kvstrata.tiers.file_layout import StoreDirectory;"
        "[StoreDirectory(Path(sys.argv[1]) / str(n)).prepare() for n in range(40)]"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(4)]

    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0, 0]


def test_a_read_only_store_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path / "store", durability="none")
    good, bad = a_label(1), a_label(2)
    store.write([filled(good), filled(bad)], within(10))
    Directory(tmp_path / "store").damage(bad.key, lambda raw: raw[:-1])

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(os, "rename", read_only)
    outcome = store.read([empty(good), empty(bad)], within(10))

    assert outcome.done == {good.key}
    assert isinstance(outcome.failed[bad.key], ChunkCorrupt), "though it could not be moved away"
    store.close()


def test_a_write_that_was_published_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = a_budget(tmp_path / "store")
    store = make(tmp_path / "store", durability="full")
    label = a_label(1)
    wait_until(lambda: budget.usage().used_bytes == 0)  # the janitor has counted

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    assert isinstance(store.write([filled(label)], within(10)).failed[label.key], TierUnavailable)

    assert budget.usage().used_bytes == sizes(tmp_path / "store")
    store.close()


def test_a_file_that_cannot_be_closed_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_calls: FileCalls
) -> None:
    budget = a_budget(tmp_path / "store")
    store = make(tmp_path / "store", durability="none")
    label = a_label(1)
    wait_until(lambda: budget.usage().used_bytes == 0)  # the janitor has counted

    def write(*args: Any, **options: Any) -> int:  # noqa: ANN401 - as it comes
        return file_calls.write(*args, **options) or errno.EIO

    monkeypatch.setattr(file_io, "calls", SimpleNamespace(write=write, add=file_calls.add))
    assert isinstance(store.write([filled(label)], within(10)).failed[label.key], TierUnavailable)

    assert budget.usage().used_bytes == sizes(tmp_path / "store") > 0
    store.close()


def test_a_write_that_fails_is_not_counted(tmp_path: Path) -> None:
    budget = a_budget(tmp_path / "store")
    store = make(tmp_path / "store", durability="none")
    label = a_label(1)
    wait_until(lambda: budget.usage().used_bytes == 0)  # the janitor has counted
    (tmp_path / "store" / "namespaces").joinpath(
        a_namespace().fingerprint, label.key.hex()[:2], f"{label.key.hex()}.0of1"
    ).mkdir()

    assert isinstance(store.write([filled(label)], within(10)).failed[label.key], TierUnavailable)
    assert budget.usage().used_bytes == 0
    assert not list((tmp_path / "store").rglob("*.tmp"))
    store.close()


def test_recency_is_noted_once_a_minute(tmp_path: Path) -> None:
    store = make(tmp_path / "store", durability="none")
    label = a_label(1)
    assert store.read([empty(label)], within(10)).absent, "which is no use"
    store.write([filled(label)], within(10))
    (file,) = (tmp_path / "store").glob(f"namespaces/*/*/{label.key.hex()}.*")
    later = int(time.time()) + 3600  # than the file's change: reads alone leave it so
    seen: list[bool] = []
    for _ in range(2):
        os.utime(file, (later, 1000))
        assert store.read([empty(label)], within(10)).done
        seen.append(file.stat().st_atime < later)

    assert seen == [True, False]
    store.close()


def test_files_of_another_owner_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path, durability="none")
    store.write([filled(a_label(n)) for n in range(5)], within(10))
    (namespace,) = (path / "namespaces").iterdir()
    os.chown(namespace, 12345, 12345)
    directory = StoreDirectory(path)

    assert evict(directory, DiskBudget(directory.usage, Limits(quota_bytes=1)), 1.0) == 0
    assert len(list(namespace.glob("*/*"))) == 5
    store.close()


def test_one_janitor_is_elected_and_another_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "store"
    settings: dict[str, Any] = {"quota": ByteSize(10**9), "durability": "none"}
    first, second = make(path, **settings), make(path, **settings)
    store = make(path, quota=ByteSize(29_000), min_free=ByteSize(0), durability="none")
    store.write([filled(a_label(1)), filled(a_label(2))], within(10))
    first.close()
    second.close()

    wait_until(lambda: sizes(path) <= 27_000)
    store.close()


def test_a_missing_folder_is_a_fault_not_a_miss(tmp_path: Path) -> None:
    store = make(tmp_path / "store", durability="none")
    label = a_label(1)
    shutil.rmtree(tmp_path / "store" / "namespaces")

    outcome = store.write([filled(label)], within(10))

    assert isinstance(outcome.failed[label.key], TierUnavailable)
    store.close()


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
