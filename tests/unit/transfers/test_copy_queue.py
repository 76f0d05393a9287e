"""Copies on a thread: loads first, every job reported once, no fault ends the thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob, CopyQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.transfers.copy_queue import CopyReport


class Recording:
    """Notes what is copied; waits at a gate, fails on demand."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken: set[bytes] = set()

    def load(self, copy: ChunkCopy) -> None:
        self._copy("load", copy)

    def store(self, copy: ChunkCopy) -> None:
        self._copy("store", copy)

    def _copy(self, verb: str, copy: ChunkCopy) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        if copy.key in self.broken:
            raise RuntimeError("the device is lost")
        self.done.append((verb, copy.key))


def a_copy(name: str) -> ChunkCopy:
    return ChunkCopy(ChunkKey(name.encode()), GroupId(0), (), 100, (1,))


def a_job(job_id: int, *names: str, waiting: str | None = None) -> CopyJob:
    return CopyJob(job_id, tuple(map(a_copy, names)), waiting)


@pytest.fixture
def copier() -> Recording:
    return Recording()


@pytest.fixture
def queue(copier: Recording) -> Iterator[CopyQueue]:
    queue = CopyQueue(copier)
    yield queue
    copier.gate.set()
    queue.close()


def taken(queue: CopyQueue, count: int) -> list[CopyReport]:
    reports: list[CopyReport] = []
    end = time.monotonic() + 10
    while len(reports) < count:
        assert time.monotonic() < end
        reports += queue.take_reports()
        time.sleep(0.001)
    return reports


def test_loads_overtake_stores(copier: Recording, queue: CopyQueue) -> None:
    copier.gate.clear()
    queue.submit([a_job(1, "first")])
    assert copier.entered.wait(10)
    queue.submit([a_job(2, "store"), a_job(3, "load", waiting="r")])
    copier.gate.set()
    taken(queue, 3)

    assert copier.done == [("store", b"first"), ("load", b"load"), ("store", b"store")]


def test_a_fault_costs_one_chunk_and_no_more(copier: Recording, queue: CopyQueue) -> None:
    copier.broken = {b"b"}
    queue.submit([a_job(1, "a", "b", "c", waiting="r"), a_job(2, "d")])
    first, second = taken(queue, 2)

    assert (first.job_id, first.failed, first.num_bytes) == (1, frozenset({ChunkKey(b"b")}), 200)
    assert (second.job_id, second.failed, second.num_bytes) == (2, frozenset(), 100)
    assert queue.take_reports() == []


def test_closing_ends_the_copy_under_way_and_drops_the_rest(
    copier: Recording, queue: CopyQueue
) -> None:
    copier.gate.clear()
    queue.submit([a_job(1, "a"), a_job(2, "b")])
    assert copier.entered.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue._is_closed:  # noqa: SLF001 - so that the thread finds it closed
        time.sleep(0.001)
    copier.gate.set()
    closing.join(10)

    assert copier.done == [("store", b"a")]
    queue.close()


def test_nothing_to_do_is_nothing(queue: CopyQueue) -> None:
    queue.submit([])

    assert queue.take_reports() == []
