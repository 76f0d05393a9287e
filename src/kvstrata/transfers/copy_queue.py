"""Copies between an engine's caches and a rank's arena, on a thread of their own.

Loads go before stores: a request waits for a load, nobody waits for a store. A copy that has begun
is finished; nothing is cancelled, so memory is never written to after its copy was reported. Jobs
and reports travel between the halves as they are.

Ownership: the thread owns the job it works on; jobs and reports lie in deques that one side appends
to and the other empties. The thread sleeps until it is called, once for each job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.tiers.room import Extent

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)


class ChunkCopy(msgspec.Struct, frozen=True, array_like=True):
    """One chunk between the device and the arena."""

    key: ChunkKey
    group_id: GroupId
    extents: tuple[Extent, ...]
    payload_bytes: int
    rows: tuple[int, ...]
    """The device's rows, in the order of the payload's."""
    first_row: int = 0
    """Loads: rows of the payload before the first that is copied."""


class CopyJob(msgspec.Struct, frozen=True, array_like=True):
    """Chunks that are copied and reported together."""

    job_id: int
    chunks: tuple[ChunkCopy, ...]
    waiting_request: str | None = None
    """Loads: the request that waits for it; None: a store, for which nobody waits."""

    @property
    def is_load(self) -> bool:
        """Whether bytes go to the device."""
        return self.waiting_request is not None


class CopyReport(msgspec.Struct, frozen=True, array_like=True):
    """How a job ended on this rank."""

    job_id: int
    failed: frozenset[ChunkKey]
    num_bytes: int
    seconds: float


class Copies(Protocol):
    """One rank's copies. Called on the rank's thread."""

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start copies. Returns at once."""
        ...

    def take_reports(self) -> list[CopyReport]:
        """Hand over what has ended since the last call. Never blocks."""
        ...

    def close(self) -> None:
        """Finish the copy under way and stop; what has not begun is dropped."""
        ...


class ChunkCopier(Protocol):
    """Moves one chunk's bytes, which are there when a call returns."""

    def load(self, copy: ChunkCopy) -> None:
        """From the arena to the device."""
        ...

    def store(self, copy: ChunkCopy) -> None:
        """From the device to the arena."""
        ...


class CopyQueue:
    """One rank's copies, chunk by chunk; the fault of one is not the others'.

    Args:
        copier: moves a chunk, on a device that has done everything before anything is submitted.
    """

    def __init__(self, copier: ChunkCopier) -> None:
        self._copier = copier
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._reports: deque[CopyReport] = deque()
        self._calls: SimpleQueue[None] = SimpleQueue()
        """One for each job that waits, and one to end."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kvstrata-copies", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start copies. Returns at once."""
        for job in jobs:
            (self._loads if job.is_load else self._stores).append(job)
        for _ in jobs:
            self._calls.put(None)

    def take_reports(self) -> list[CopyReport]:
        """Hand over what has ended since the last call. Never blocks."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the copy under way and stop; what has not begun is dropped."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            self._reports.append(self._run(job))

    def _take(self) -> CopyJob | None:
        self._calls.get()
        if self._is_closed:
            return None
        return self._loads.popleft() if self._loads else self._stores.popleft()

    def _run(self, job: CopyJob) -> CopyReport:
        start = time.perf_counter()
        failed = self._move(job)
        num_bytes = sum(copy.payload_bytes for copy in job.chunks if copy.key not in failed)
        return CopyReport(job.job_id, failed, num_bytes, time.perf_counter() - start)

    def _move(self, job: CopyJob) -> frozenset[ChunkKey]:
        """Move a job's chunks; the keys of those that failed."""
        move = self._copier.load if job.is_load else self._copier.store
        failed: set[ChunkKey] = set()
        for copy in job.chunks:
            try:
                move(copy)
            except Exception:  # noqa: BLE001 - a fault costs this chunk, never the thread
                if not failed:  # one device, one cause: the first says it for all
                    _log.exception("a copy of %s failed", copy.key.hex())
                failed.add(copy.key)
        return frozenset(failed)
