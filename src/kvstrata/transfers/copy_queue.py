"""Copies between an engine's caches and a rank's arena, on a thread of their own.

Loads go before stores: a request waits for a load, nobody waits for a store. A copy that has begun
is finished; nothing is cancelled, so memory is never written to after its copy was reported.

Ownership: the thread owns the job it works on; the two queues are handed over under a lock; reports
pile up in a deque that one side appends to and the other empties.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey, GroupId
    from kvstrata.tiers.room import Extent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk between the device and the arena."""

    key: ChunkKey
    group_id: GroupId
    extents: tuple[Extent, ...]
    payload_bytes: int
    rows: tuple[int, ...]
    """The device's rows, in the order of the payload's."""
    first_row: int = 0
    """Loads: rows of the payload before the first that is copied."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Chunks that are copied and reported together."""

    job_id: int
    chunks: tuple[ChunkCopy, ...]
    waiting_request: str | None = None
    """Loads: the request that waits for it; None: a store, for which nobody waits."""

    @property
    def is_load(self) -> bool:
        """Whether bytes go to the device."""
        return self.waiting_request is not None


@dataclass(frozen=True, slots=True)
class CopyReport:
    """How a job ended on this rank."""

    job_id: int
    failed: frozenset[ChunkKey]
    num_bytes: int
    seconds: float


class Copier(Protocol):
    """Moves one chunk's bytes. Called on the queue's thread."""

    def load(self, copy: ChunkCopy) -> None:
        """From the arena to the device; the bytes are there when it returns."""
        ...

    def store(self, copy: ChunkCopy) -> None:
        """From the device to the arena; the bytes are there when it returns."""
        ...


class CopyQueue:
    """One rank's copies.

    Args:
        copier: moves the bytes.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._reports: deque[CopyReport] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kvstrata-copies", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start copies. Returns at once."""
        if not jobs:
            return
        with self._changed:
            for job in jobs:
                (self._loads if job.is_load else self._stores).append(job)
            self._changed.notify()

    def take_reports(self) -> list[CopyReport]:
        """Hand over what has ended since the last call. Never blocks."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the copy under way and stop; what has not begun is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            self._reports.append(self._run(job))

    def _take(self) -> CopyJob | None:
        with self._changed:
            while not self._is_closed:
                if self._loads:
                    return self._loads.popleft()
                if self._stores:
                    return self._stores.popleft()
                self._changed.wait()
            return None

    def _run(self, job: CopyJob) -> CopyReport:
        start = time.perf_counter()
        move = self._copier.load if job.is_load else self._copier.store
        failed: set[ChunkKey] = set()
        for copy in job.chunks:
            try:
                move(copy)
            except Exception:  # noqa: BLE001 - a fault costs this chunk, never the thread
                if not failed:  # one device, one cause: the first says it for all
                    _log.exception("a copy of %s failed", copy.key.hex())
                failed.add(copy.key)
        num_bytes = sum(copy.payload_bytes for copy in job.chunks if copy.key not in failed)
        return CopyReport(job.job_id, frozenset(failed), num_bytes, time.perf_counter() - start)
