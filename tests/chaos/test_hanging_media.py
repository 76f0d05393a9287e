from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import TierTimeout
from kvstrata.hierarchy.task_queue import Verb
from kvstrata.hierarchy.tier_io import TierIO
from kvstrata.testing.chunks import a_label, a_namespace, empty, filled, within
from kvstrata.testing.servers import wait_until

from .media import faulty_mount
from .support import RawDirectory, a_generator, directory_store, rounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstrata.core.chunk_label import ChunkBuffer, ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.hierarchy.tier_io import IOReport
    from kvstrata.testing.faults import Tally

    from .media import FaultyMount

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

POLL_S = 0.001


class Traffic:
    """Jobs for a `TierIO`, whose reports are awaited and timed."""

    def __init__(self, tier_io: TierIO, tally: Tally) -> None:
        self._io = tier_io
        self._tally = tally
        self._ids = itertools.count()
        self.held: set[ChunkKey] = set()

    def run(self, verb: Verb, chunks: Sequence[ChunkBuffer], given_s: float) -> TierOutcome:
        """Start a job and wait for its report."""
        start, job_id = time.monotonic(), next(self._ids)
        if verb is Verb.FIND:
            self._io.find(job_id, [chunk.label.key for chunk in chunks], within(given_s))
        else:
            self._io.move(job_id, verb, chunks, within(given_s))
        for report in self._reports():
            if report.job_id == job_id and not report.released:
                self._tally.time(time.monotonic() - start, given_s)
                return report.outcome
        raise AssertionError("reports never end")

    def wait_until_released(self) -> None:
        """Wait until the medium touches no buffer any more."""
        reports = self._reports()
        while self.held:
            next(reports)

    def _reports(self) -> Iterator[IOReport]:
        give_up = within(20)
        while time.monotonic() < give_up:
            for report in self._io.take_reports():
                self.held = (self.held | report.held) - report.released
                yield report
            time.sleep(POLL_S)
        raise TimeoutError("no report")


def test_a_hanging_file_system_costs_no_more_than_the_deadline(
    tmp_path: Path, tally: Tally
) -> None:
    rng = a_generator("hanging")
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store")
        tier_io = TierIO("hanging", store)
        traffic = Traffic(tier_io, tally)
        for number in range(rounds(short=4, full=60)):
            written = [a_label(100 * number + index) for index in range(6)]
            assert len(traffic.run(Verb.WRITE, list(map(filled, written)), 10).done) == 6
            mount.hang()
            tally.inject("file system hangs")
            verb = rng.choice(list(Verb))
            what = work_for(verb, written, number)
            outcome = traffic.run(verb, what, rng.uniform(0.3, 0.6))
            assert len(outcome.failed) == 6
            assert all(isinstance(error, TierTimeout) for error in outcome.failed.values())
            mount.resume()
            traffic.wait_until_released()
            buffers = [empty(label) for label in written]
            outcome = traffic.run(Verb.READ, buffers, 10)
            assert len(outcome.done) == 6
            tally.verify(buffers, outcome)
        tier_io.close()
    tally.check()


def work_for(verb: Verb, written: Sequence[ChunkLabel], number: int) -> list[ChunkBuffer]:
    if verb is Verb.WRITE:
        return [filled(a_label(100 * number + 50 + index)) for index in range(6)]
    return [empty(label) for label in written]


def test_one_chunk_that_hangs_keeps_no_other_waiting(tmp_path: Path, tally: Tally) -> None:
    """A pipe in a chunk's place: whoever opens it waits for somebody to write."""
    rng, medium = a_generator("pipes"), RawDirectory(tmp_path / "store")
    store = directory_store(tmp_path / "store")
    tier_io = TierIO("pipes", store, num_threads=4)
    traffic = Traffic(tier_io, tally)
    for number in range(rounds(short=4, full=45)):
        labels = [a_label(100 * number + index) for index in range(10)]
        store.write([filled(label) for label in labels], within(10))
        stuck = rng.sample(labels, k=rng.randint(1, 3))
        pipes = [medium.path(a_namespace(), label.key) for label in stuck]
        for pipe in pipes:
            pipe.unlink()
            os.mkfifo(pipe)
            tally.inject("pipe in a chunk's place")
        buffers = [empty(label) for label in labels]
        outcome = traffic.run(Verb.READ, buffers, rng.uniform(0.3, 0.5))
        tally.verify(buffers, outcome)
        free_readers(pipes)
        traffic.wait_until_released()

        assert outcome.failed.keys() == {label.key for label in stuck}
        assert len(outcome.done) == len(labels) - len(stuck)
    tier_io.close()
    tally.check()


def free_readers(pipes: Iterable[Path]) -> None:
    """Open the other end, if anybody still waits at this one."""
    for pipe in pipes:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            continue


def test_a_store_on_a_hanging_file_system_can_be_closed(tmp_path: Path, tally: Tally) -> None:
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store", quota_bytes=2**30)
        tier_io = TierIO("hanging", store)
        traffic = Traffic(tier_io, tally)
        traffic.run(Verb.WRITE, [filled(a_label(1))], 10)
        mount.hang()
        tally.inject("file system hangs")
        traffic.run(Verb.WRITE, [filled(a_label(n)) for n in range(2, 8)], 0.5)
        closing = threading.Thread(target=tier_io.close, args=(0.5,), daemon=True)
        closing.start()
        closing.join(10)
        is_closed = not closing.is_alive()
        mount.resume()
        closing.join(10)
        wait_until(lambda: not has_threads("kvstrata-hanging"), "the end of the threads")
        assert is_closed, "closing waits for the file system"
    tally.check()


def has_threads(name: str) -> bool:
    return any(thread.name.startswith(name) for thread in threading.enumerate())


def test_a_file_system_that_dies_is_a_fault(tmp_path: Path, tally: Tally) -> None:
    with faulty_mount(tmp_path / "base") as mount:
        store = directory_store(mount.path / "store")
        tier_io = TierIO("dying", store)
        traffic = Traffic(tier_io, tally)
        labels = [a_label(n) for n in range(6)]
        traffic.run(Verb.WRITE, [filled(label) for label in labels], 10)
        kill_later(mount)
        tally.inject("file system dies")
        for _ in range(20):
            outcome = traffic.run(Verb.READ, [empty(label) for label in labels], 1.0)
            assert not outcome.absent, "gone is not the same as never there"
        tier_io.close()
    tally.check()


def kill_later(mount: FaultyMount) -> None:
    mount.hang()
    threading.Timer(0.3, mount.die).start()
