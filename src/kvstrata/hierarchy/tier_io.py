"""Runs a rank's reads, writes and questions to one tier on threads, and keeps their deadlines.

A call into a hung file system cannot be interrupted. So the deadline is kept here: when it passes,
the job is reported with a timeout for what is missing, and the thread is left to return whenever it
does. Until then the medium may still write into the buffers, so they are reported as *held*, and
released by a later report. Reads are taken before writes.

Ownership: `_jobs` and everything in it belongs to the thread that submits and takes reports. The
worker threads take tasks from `_tasks` and append to `_results`; both are made for that. A task's
`is_dropped` is written by the owner and read by the workers, who may see it late.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import ClosedError, TierError, TierTimeout, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.interfaces import ChunkStore

_log = logging.getLogger(__name__)


class Verb(IntEnum):
    """What a job asks for; smaller ones go first."""

    FIND = 0
    READ = 1
    WRITE = 2


class IOReport(NamedTuple):
    """What became of a job, or of buffers it held on to."""

    job_id: int
    outcome: TierOutcome
    """Empty in a report that only releases."""
    held: frozenset[ChunkKey]
    """Keys whose buffers the medium may still touch."""
    released: frozenset[ChunkKey]
    """Keys held until now."""
    seconds: float
    """From submission to this report."""


@dataclass(slots=True)
class _Task:
    """A part of a job that one thread does."""

    job_id: int
    verb: Verb
    chunks: tuple[ChunkBuffer, ...]
    keys: tuple[ChunkKey, ...]
    deadline: Deadline
    is_dropped: bool = False


@dataclass(slots=True)
class _Job:
    """A job under way."""

    started: float
    deadline: Deadline
    tasks: list[_Task]
    outcome: TierOutcome = field(default_factory=TierOutcome)
    is_reported: bool = False


_STOP: Final = None


class TierIO:
    """One rank's traffic with one tier.

    Args:
        name: the tier's, for errors.
        store: the rank's store.
        num_threads: how many calls run at once.
        chunks_per_task: how a batch is cut: one for media that work through a batch one by one,
            more for those that pipeline it.
    """

    def __init__(
        self, name: str, store: ChunkStore, *, num_threads: int = 4, chunks_per_task: int = 1
    ) -> None:
        self._name = name
        self._store = store
        self._chunks_per_task = chunks_per_task
        self._tasks: queue.PriorityQueue[tuple[int, int, _Task | None]] = queue.PriorityQueue()
        self._results: deque[tuple[_Task, TierOutcome]] = deque()
        self._sequence = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstrata-{name}-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        """Jobs not reported, and jobs whose buffers are held."""
        return len(self._jobs)

    def submit(
        self,
        job_id: int,
        verb: Verb,
        what: Sequence[ChunkBuffer] | Sequence[ChunkKey],
        deadline: Deadline,
    ) -> None:
        """Start a job: buffers to read or write, or keys to find. Returns at once."""
        size = len(what) if verb is Verb.FIND else self._chunks_per_task
        batches = [what[i : i + size] for i in range(0, len(what), max(1, size))]
        tasks = [self._task(job_id, verb, batch, deadline) for batch in batches]
        self._jobs[job_id] = _Job(time.monotonic(), deadline, tasks)
        for task in tasks:
            self._tasks.put((verb, next(self._sequence), task))

    def take_reports(self) -> list[IOReport]:
        """Hand over what has ended, or ran out of time, since the last call. Never blocks."""
        reports: list[IOReport] = []
        while self._results:
            reports.extend(self._end_task(*self._results.popleft()))
        now = time.monotonic()
        for job_id, job in list(self._jobs.items()):
            if not job.is_reported and (now > job.deadline or not job.tasks):
                reports.append(self._report(job_id, job, now))
        return reports

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads as far as they return, and close the store."""
        for _ in self._threads:
            self._tasks.put((-1, next(self._sequence), _STOP))
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._store.close()

    @staticmethod
    def _task(
        job_id: int,
        verb: Verb,
        batch: Sequence[ChunkBuffer] | Sequence[ChunkKey],
        deadline: Deadline,
    ) -> _Task:
        if verb is Verb.FIND:
            return _Task(job_id, verb, (), tuple(batch), deadline)  # type: ignore[arg-type]
        chunks: tuple[ChunkBuffer, ...] = tuple(batch)  # type: ignore[arg-type]
        return _Task(job_id, verb, chunks, tuple(c.label.key for c in chunks), deadline)

    def _end_task(self, task: _Task, outcome: TierOutcome) -> list[IOReport]:
        job = self._jobs[task.job_id]
        job.tasks.remove(task)
        if not job.is_reported:
            job.outcome = job.outcome.merged(outcome)
            if job.tasks:
                return []
            return [self._report(task.job_id, job, time.monotonic())]
        if not job.tasks:
            del self._jobs[task.job_id]
        seconds = time.monotonic() - job.started
        released = frozenset(task.keys)
        return [IOReport(task.job_id, TierOutcome(), frozenset(), released, seconds)]

    def _report(self, job_id: int, job: _Job, now: float) -> IOReport:
        """Say how a job ended; what is still under way has run out of time."""
        late = [key for task in job.tasks for key in task.keys]
        error = TierTimeout(self._name, f"no answer in {now - job.started:.3f} s", late)
        for task in job.tasks:
            task.is_dropped = True
        job.is_reported = True
        if not job.tasks:
            del self._jobs[job_id]
        outcome = job.outcome.merged(TierOutcome.all_failed(late, error))
        return IOReport(job_id, outcome, frozenset(late), frozenset(), now - job.started)

    def _work(self) -> None:
        """One thread: take a task, do it, say how it ended; until told to stop."""
        while True:
            _, _, task = self._tasks.get()
            if task is _STOP:
                return
            self._results.append((task, self._do(task)))

    def _do(self, task: _Task) -> TierOutcome:
        if task.is_dropped:
            return TierOutcome()
        try:
            if task.verb is Verb.FIND:
                return self._store.find(task.keys, task.deadline)
            if task.verb is Verb.READ:
                return self._store.read(task.chunks, task.deadline)
            return self._store.write(task.chunks, task.deadline)
        except ClosedError:
            error: TierError = TierUnavailable(self._name, "closed", task.keys)
        except Exception as unexpected:  # noqa: BLE001 - a store's bug must not end the thread
            _log.exception("tier %s: unexpected error", self._name)
            error = TierUnavailable(self._name, f"unexpected {unexpected!r}", task.keys)
        return TierOutcome.all_failed(task.keys, error)
