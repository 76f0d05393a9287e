from __future__ import annotations

import errno
import os
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ChunkCorrupt, ConfigError, TierError, TierFull, TierUnavailable
from kvstrata.testing.chunks import a_label, a_namespace, empty, filled, within
from kvstrata.testing.servers import wait_until

from .clients import StoreClient
from .media import faulty_mount, loop_disk, remount, small_tmpfs
from .support import RawDirectory, a_generator, directory_store, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.interfaces import ChunkStore
    from kvstrata.testing.faults import Tally

    from .media import FaultyMount

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOBODY = 65534


def read(store: ChunkStore, labels: Iterable[ChunkLabel], tally: Tally) -> TierOutcome:
    buffers = [empty(label) for label in labels]
    outcome = store.read(buffers, within(20))
    tally.verify(buffers, outcome)
    return outcome


def test_a_full_disk_refuses_chunks_and_keeps_the_others(tmp_path: Path, tally: Tally) -> None:
    rng, kept = a_generator("full disk"), list[int]()
    with small_tmpfs(tmp_path / "mount", 3 * 2**20) as folder:
        store = directory_store(folder / "store")
        for number in range(rounds(short=400, full=3_000)):
            label = a_label(number)
            outcome = store.write([filled(label)], within(10))
            if outcome.done:
                kept.append(number)
                continue
            tally.inject("no space left")
            assert isinstance(outcome.failed[label.key], TierFull)
            assert not list(folder.rglob("*.tmp")), "what did not fit is gone"
            for _ in range(rng.randint(0, 3)):
                store.remove([a_label(kept.pop(rng.randrange(len(kept)))).key], within(10))
        assert len(read(store, map(a_label, kept), tally).done) == len(kept)
        store.close()
    assert tally.num_faults > 50
    tally.check()


def test_a_disk_that_turns_read_only_still_serves_what_it_has(tmp_path: Path, tally: Tally) -> None:
    with loop_disk(tmp_path / "base", 32 * 2**20) as disk:
        store = directory_store(disk.path / "store")
        labels = [a_label(number) for number in range(20)]
        store.write([filled(label) for label in labels], within(10))
        disk.report_error()
        refused = store.write([filled(a_label(n)) for n in range(100, 120)], within(10))
        tally.inject("read-only file system", 40)

        assert {type(error) for error in refused.failed.values()} == {TierUnavailable}
        assert len(refused.failed) == 20
        outcome = read(store, labels, tally)
        assert outcome.done == {label.key for label in labels}, str(outcome.failed)
        store.close()
    tally.check()


def test_damage_on_a_read_only_disk_is_called_damage(tmp_path: Path, tally: Tally) -> None:
    with loop_disk(tmp_path / "base", 32 * 2**20) as disk:
        store = directory_store(disk.path / "store")
        label = a_label(1)
        store.write([filled(label)], within(10))
        medium = RawDirectory(disk.path / "store")
        medium.put(a_namespace(), label.key, medium.get(a_namespace(), label.key)[:-1])
        disk.report_error()
        tally.inject("read-only file system")

        assert isinstance(read(store, [label], tally).failed[label.key], ChunkCorrupt)
        store.close()
    tally.check()


def test_a_store_on_a_read_only_mount_cannot_be_opened(tmp_path: Path, tally: Tally) -> None:
    with small_tmpfs(tmp_path / "mount", 2**22) as folder:
        directory_store(folder / "store").close()
        remount(folder, "ro")
        tally.inject("read-only file system")
        with pytest.raises(ConfigError, match="cannot be used"):
            directory_store(folder / "store")
        remount(folder, "rw")
        directory_store(folder / "store").close()


def test_lost_permissions_are_a_fault_until_they_are_back(tmp_path: Path, tally: Tally) -> None:
    rng, numbers = a_generator("permissions"), list(range(30))
    os.chown(tmp_path, NOBODY, NOBODY)
    settings = {"kind": "filesystem", "path": "store", "durability": "none", "min_free": "0B"}
    with StoreClient(settings, folder=tmp_path, uid=NOBODY) as client:
        assert client.ask("write", numbers).done == numbers
        for _ in range(rounds(short=5, full=60)):
            harmed = sorted(rng.sample(numbers, k=10))
            restore = [take_away(tmp_path / "store", number, rng.choice("fd")) for number in harmed]
            tally.inject("permission lost", len(harmed))
            answer = client.ask("read", numbers)
            tally.count_verified(len(answer.done), num_wrong=answer.num_wrong)
            assert set(answer.failed.values()) == {"TierUnavailable"}
            assert set(map(str, harmed)) <= set(answer.failed)
            for put_back in reversed(restore):
                put_back()
            assert client.ask("read", numbers).done == numbers
    tally.check()


def take_away(store: Path, number: int, what: str) -> Callable[[], None]:
    """Forbid a chunk's file, or its folder; return how to allow it again."""
    file = RawDirectory(store).path(a_namespace(), a_label(number).key)
    path = file if what == "f" else file.parent
    mode = path.stat().st_mode
    path.chmod(0)
    return lambda: path.chmod(mode)


def test_media_errors_are_faults_and_never_other_bytes(tmp_path: Path, tally: Tally) -> None:
    rng = a_generator("media errors")
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store")
        acknowledged: list[ChunkLabel] = []
        for number in range(rounds(short=6, full=60)):
            labels = [a_label(100 * number + index) for index in range(10)]
            mount.fail(rng.choice([0.02, 0.1, 0.3, 1.0]))
            written = store.write([filled(label) for label in labels], within(20))
            acknowledged += [label for label in labels if label.key in written.done]
            faults = [written, read(store, acknowledged[-20:], tally)]
            faults.append(store.remove([a_label(10**6).key], within(10)))
            assert all(is_a_fault_of(outcome, TierUnavailable) for outcome in faults)
        mount.fail(0)
        assert len(read(store, acknowledged, tally).done) == len(acknowledged)
        store.close()
        tally.inject("input/output error", mount.num_faults)
    tally.check()


def is_a_fault_of(outcome: TierOutcome, kind: type[TierError]) -> bool:
    return all(type(error) is kind for error in outcome.failed.values())


def test_the_janitor_survives_media_errors(tmp_path: Path, tally: Tally) -> None:
    """Errors while it looks after a directory, and then more chunks than the quota allows."""
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store", quota_bytes=30 * 14_096)
        for number in range(rounds(short=2, full=10)):
            mount.fail(1.0)
            store.write([filled(a_label(number))], within(10))
            wait_for_faults(mount, 2)
            mount.fail(0)
        assert num_written_beyond_quota(store) > 30, "somebody made room"
        store.close()
        tally.inject("input/output error", mount.num_faults)


def wait_for_faults(mount: FaultyMount, count: int) -> None:
    before = mount.num_faults
    wait_until(lambda: mount.num_faults >= before + count, "the janitor's attempts")


def num_written_beyond_quota(store: ChunkStore) -> int:
    """Try for a while to write more than fits at once."""
    end, done = within(10), 0
    for number in range(1000, 1060):
        while not store.write([filled(a_label(number))], end).done:
            if end < within(0):
                return done
            time.sleep(0.02)
        done += 1
    return done


def test_a_file_system_without_hard_links_can_hold_a_store(tmp_path: Path) -> None:
    with faulty_mount(tmp_path / "base") as mount:
        mount.forbid_links()
        store, label = directory_store(mount.path / "store"), a_label(1)
        assert store.write([filled(label)], within(10)).done == {label.key}
        store.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_every_refusal_of_a_file_system_is_a_fault(
    tmp_path: Path, tally: Tally, error: int
) -> None:
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store")
        mount.fail(1.0, error)
        outcome = store.write([filled(a_label(n)) for n in range(10)], within(10))
        expected = TierFull if error in (errno.ENOSPC, errno.EDQUOT) else TierUnavailable
        assert len(outcome.failed) == 10
        assert is_a_fault_of(outcome, expected)
        mount.fail(0)
        store.close()
        tally.inject(f"error {errno.errorcode[error]}", mount.num_faults)


def test_other_things_in_a_chunks_place_are_faults(tmp_path: Path, tally: Tally) -> None:
    store, medium = directory_store(tmp_path / "store"), RawDirectory(tmp_path / "store")
    makers: list[Callable[[Path], None]] = [
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/null"),
        lambda path: path.symlink_to("/dev/zero"),
    ]
    for number, make in enumerate(makers * rounds(short=5, full=25)):
        label = a_label(number)
        make(medium.path(a_namespace(), label.key))
        tally.inject("no file in a chunk's place")
        outcome = read(store, [label], tally)
        assert isinstance(outcome.failed[label.key], ChunkCorrupt | TierUnavailable)
    store.close()
    tally.check()


def test_a_directory_that_is_deleted_is_a_fault(tmp_path: Path, tally: Tally) -> None:
    store = directory_store(tmp_path / "store")
    store.write([filled(a_label(n)) for n in range(10)], within(10))
    shutil.rmtree(tmp_path / "store" / "namespaces")
    tally.inject("directory deleted")

    assert len(read(store, map(a_label, range(10)), tally).absent) == 10
    outcome = store.write([filled(a_label(n)) for n in range(10)], within(10))
    assert len(outcome.failed) == 10
    assert is_a_fault_of(outcome, TierUnavailable)
    store.close()
