"""Copies between caches on a GPU and the arena, on streams of their own.

No thread: whatever a job takes is put on a stream when it is submitted, and a report asks the GPU
whether that has ended. A thread would have to take the interpreter's lock from the engine several
times for each job, for up to five milliseconds each time.

Loads and stores have a stream each, so that nobody waits for a store. A stream first waits for what
the engine has put on its own: a store reads what the step has computed, and a load does not
overwrite what a step still reads.

Ownership: the rank's thread calls everything here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kvstrata.transfers.copy_queue import CopyReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob

_log = logging.getLogger(__name__)


class DeviceRows(Protocol):
    """Moves chunks on the current stream; returns before the bytes are there."""

    def load(self, copies: Sequence[ChunkCopy]) -> None:
        """From the arena into the caches."""
        ...

    def store(self, copies: Sequence[ChunkCopy]) -> None:
        """From the caches into the arena."""
        ...


class _Started(NamedTuple):
    """A job that is on a stream."""

    job: CopyJob
    failed: frozenset[ChunkKey]
    """Of a job that could not be started, all; what was started of it ends all the same."""
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def report(self) -> CopyReport:
        """How it ended."""
        copied = [copy.payload_bytes for copy in self.job.chunks if copy.key not in self.failed]
        seconds = self.begin.elapsed_time(self.end) / 1e3
        return CopyReport(self.job.job_id, self.failed, sum(copied), seconds)


class StreamQueue:
    """One rank's copies, as `CopyQueue` does them; a job fails as a whole.

    Args:
        views: the engine's caches, on a GPU.
        rows: moves chunks there.
    """

    def __init__(self, views: CacheViews, rows: DeviceRows) -> None:
        self._views = views
        self._rows = rows
        self._loads = torch.cuda.Stream(views.device)
        self._stores = torch.cuda.Stream(views.device)
        self._under_way: dict[torch.cuda.Stream, deque[_Started]] = {
            self._loads: deque(),
            self._stores: deque(),
        }

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start copies. Returns at once."""
        if not jobs:
            return
        engine = torch.cuda.current_stream(self._views.device)
        for job in jobs:
            stream = self._loads if job.is_load else self._stores
            stream.wait_stream(engine)
            with torch.cuda.device(self._views.device), torch.cuda.stream(stream):
                self._under_way[stream].append(self._start(job))

    def take_reports(self) -> list[CopyReport]:
        """Hand over what has ended since the last call. Never blocks."""
        return [
            started.report()
            for under_way in self._under_way.values()
            for started in _ended(under_way)
        ]

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is under way, which is everything, but not for a GPU that hangs."""
        end = time.monotonic() + timeout_s
        while any(self._under_way.values()) and time.monotonic() < end:
            self.take_reports()
            time.sleep(0.0005)

    def _start(self, job: CopyJob) -> _Started:
        """Put a job on the current stream."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        failed: frozenset[ChunkKey] = frozenset()
        begin.record()
        try:
            if copies := [copy for copy in job.chunks if copy.rows]:
                (self._rows.load if job.is_load else self._rows.store)(copies)
        except Exception:  # noqa: BLE001 - a fault costs this job, never the engine
            _log.exception("copies on %s failed", self._views.device)
            failed = frozenset(copy.key for copy in job.chunks)
        end.record()
        return _Started(job, failed, begin, end)


def _ended(under_way: deque[_Started]) -> Iterator[_Started]:
    """Take what has ended off a stream's jobs; they end in order."""
    while under_way and under_way[0].end.query():
        yield under_way.popleft()
