"""Collecting garbage keeps what was used last, and never touches what is not ours."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ConfigError
from kvstrata.operations.collection import collect_garbage
from kvstrata.operations.directory_listing import DirectoryListing
from kvstrata.operations.listing import Totals
from kvstrata.testing.chunks import a_namespace
from kvstrata.tiers.file_layout import StoreDirectory, temporary_path

if TYPE_CHECKING:
    from .conftest import MadeStore

SIZE = 14_096


def use_in_order(store: MadeStore, *numbers: int) -> None:
    for moment, number in enumerate(numbers, 1):
        os.utime(store.path(number), ns=(moment * 10**9, 0))


def counted(store: MadeStore) -> int:
    usage = DirectoryListing(store.root).housekeeping().usage
    assert usage is not None
    assert usage.drift_bytes == 0
    return usage.counted_bytes


def test_the_most_recently_used_stay(store: MadeStore) -> None:
    store.write(4)
    use_in_order(store, 3, 1, 4, 2)
    kept = {store.path(4), store.path(2)}

    done = collect_garbage(store.root, 2 * SIZE + 100)

    assert set(store.root.glob("namespaces/*/*/*")) == kept
    assert done.has_reached_quota
    assert done.evicted == Totals(2, 2 * SIZE)
    assert (done.before_bytes, done.after_bytes) == (4 * SIZE, 2 * SIZE)
    assert done.is_alone
    assert counted(store) == 2 * SIZE


def test_a_store_within_the_quota_keeps_everything(store: MadeStore) -> None:
    before = store.files()

    done = collect_garbage(store.root, 3 * SIZE)

    assert store.files() == before
    assert done.evicted == Totals()
    assert done.has_reached_quota


def test_nothing_is_left_of_a_quota_of_zero(store: MadeStore) -> None:
    assert collect_garbage(store.root, 0).after_bytes == 0
    assert counted(store) == 0


def test_the_quarantine_goes_first(store: MadeStore) -> None:
    use_in_order(store, 1, 2, 3)
    bad = store.root / "quarantine" / "bad"
    bad.write_bytes(b"x" * SIZE)

    collect_garbage(store.root, 3 * SIZE)

    assert not bad.exists()
    assert store.path(1).exists()


def test_leftovers_go_and_running_writers_stay(store: MadeStore) -> None:
    folder = store.path(1).parent
    alive, gone, fresh = (Path(temporary_path(folder)) for _ in range(3))
    for path in (alive, gone, fresh):
        path.write_bytes(b"x" * 10)
    for path in (alive, gone):
        os.utime(path, (0, 0))

    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = collect_garbage(store.root, 10 * SIZE)

    assert done.leftovers == Totals(1, 10)
    assert [path.exists() for path in (alive, gone, fresh)] == [True, False, True]
    assert counted(store) == 3 * SIZE + 20


def test_running_writers_can_keep_the_quota_from_being_reached(store: MadeStore) -> None:
    Path(temporary_path(store.path(1).parent)).write_bytes(b"x" * 100)

    done = collect_garbage(store.root, 50)

    assert not done.has_reached_quota
    assert done.after_bytes == 100


def test_a_janitor_at_work_is_no_obstacle(store: MadeStore) -> None:
    with StoreDirectory(store.root).janitor_lock.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = collect_garbage(store.root, SIZE)

    assert not done.is_alone
    assert done.after_bytes == SIZE


def test_no_file_is_made(store: MadeStore) -> None:
    (store.root / "usage").unlink()
    (store.root / "janitor.lock").unlink()
    before = store.files()

    done = collect_garbage(store.root, 3 * SIZE)

    assert store.files() == before
    assert done.is_alone
    assert done.is_usage_right


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_namespaces_of_other_users_are_counted_but_not_touched(store: MadeStore) -> None:
    store.write(7, 8, weights="theirs")
    theirs = store.root / "namespaces" / a_namespace("theirs").fingerprint
    os.chown(theirs, 12345, 12345)
    quarantined = store.root / "quarantine" / "theirs"
    quarantined.write_bytes(b"x" * 10)
    os.chown(quarantined, 12345, 12345)

    done = collect_garbage(store.root, SIZE)

    assert not done.has_reached_quota
    assert done.foreign_bytes == 2 * SIZE + 10
    assert done.evicted == Totals(3, 3 * SIZE)
    assert len(list(theirs.glob("*/*"))) == 2
    assert quarantined.exists()
    assert counted(store) == 10


def test_links_are_neither_followed_nor_deleted(store: MadeStore, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (store.root / "namespaces" / "link").symlink_to(tmp_path)
    link = store.path(1).parent / "link"
    link.symlink_to(precious / "file")

    collect_garbage(store.root, 0)

    assert (precious / "file").exists()
    assert link.is_symlink()


def test_another_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="no kvstrata store"):
        collect_garbage(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
