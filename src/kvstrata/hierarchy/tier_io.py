"""Runs a rank's reads, writes and questions to one tier on threads, and keeps their deadlines.

A call into a hung file system cannot be interrupted. So the deadline is kept here: when it passes,
the job is reported with a timeout for what is missing, and a thread that is in the medium is left
to return whenever it does. Until then the medium may still write into the buffers, so they are
reported as *held*, and released by a later report. What no thread had begun is given up and free.

Ownership: `_jobs` and everything in it belongs to the thread that submits and takes reports. The
worker threads take tasks from the queue and append to `_results`; both are made for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import ClosedError, TierError, TierTimeout, TierUnavailable
from kvstrata.hierarchy.task_queue import Task, TaskQueue, Verb
from kvstrata.interfaces import TellsEvictions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.interfaces import ChunkStore

_log = logging.getLogger(__name__)

FEWEST_THREADS: Final = 2
"""One of them takes no writes, so that loads do not wait behind stores."""
PATIENCE_S: Final = 1.0
"""A call that was given less time than this says nothing about the tier when it runs out."""


class IOReport(NamedTuple):
    """What became of a job, or of buffers it held on to."""

    job_id: int
    outcome: TierOutcome
    """Empty in a report that only releases."""
    held: frozenset[ChunkKey]
    """Keys whose buffers the medium may still touch."""
    released: frozenset[ChunkKey]
    """Keys held until now."""
    hurried: frozenset[ChunkKey]
    """Keys that ran out of time without the tier being to blame."""
    slowest_s: float
    """The longest that the medium took for one task."""
    seconds: float
    """From the first task's start to the last one's end."""


@dataclass(slots=True)
class _Job:
    """A job under way."""

    deadline: Deadline
    tasks: list[Task]
    outcome: TierOutcome = field(default_factory=TierOutcome)
    is_reported: bool = False
    slowest_s: float = 0.0
    first_start: float = float("inf")
    last_end: float = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, self.last_end - self.first_start)

    def ended(self, task: Task, ended: float) -> None:
        """Note how long one task took."""
        self.tasks.remove(task)
        started = ended if task.started is None else task.started
        self.slowest_s = max(self.slowest_s, ended - started)
        self.first_start = min(self.first_start, started)
        self.last_end = max(self.last_end, ended)


class _Result(NamedTuple):
    """How a task ended, and when."""

    task: Task
    outcome: TierOutcome
    ended: float


class TierIO:
    """One rank's traffic with one tier.

    Args:
        name: the tier's, for errors.
        store: the rank's store.
        num_threads: how many calls run at once; at least two.
        chunks_per_task: how a batch is cut: one for media that work through a batch one by one,
            more for those that pipeline it.
    """

    def __init__(
        self, name: str, store: ChunkStore, *, num_threads: int = 4, chunks_per_task: int = 1
    ) -> None:
        self._name = name
        self._store = store
        self._tells = store if isinstance(store, TellsEvictions) else None
        self._chunks_per_task = chunks_per_task
        self._queue = TaskQueue()
        self._results: deque[_Result] = deque()
        self._jobs: dict[int, _Job] = {}
        self._has_told = False
        """Whether an unexpected error was logged."""
        self._threads = [
            threading.Thread(
                target=self._work, args=(n > 0,), name=f"kvstrata-{name}-{n}", daemon=True
            )
            for n in range(max(FEWEST_THREADS, num_threads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        """Jobs not reported, and jobs whose buffers are held."""
        return len(self._jobs)

    def move(
        self, job_id: int, verb: Verb, chunks: Sequence[ChunkBuffer], deadline: Deadline
    ) -> None:
        """Start to read or write buffers. Returns at once."""
        size = self._chunks_per_task
        batches = [tuple(chunks[i : i + size]) for i in range(0, len(chunks), size)]
        tasks = [
            Task(job_id, verb, batch, tuple(chunk.label.key for chunk in batch), deadline)
            for batch in batches
        ]
        self._start(job_id, tasks, deadline)

    def find(self, job_id: int, keys: Sequence[ChunkKey], deadline: Deadline) -> None:
        """Start to ask about keys. Returns at once."""
        self._start(job_id, [Task(job_id, Verb.FIND, (), tuple(keys), deadline)], deadline)

    def take_reports(self) -> list[IOReport]:
        """Hand over what has ended, or ran out of time, since the last call. Never blocks."""
        reports: list[IOReport] = []
        while self._results:
            reports.extend(self._end_task(self._results.popleft()))
        now = time.monotonic()
        for job_id, job in list(self._jobs.items()):
            if not job.is_reported and (now > job.deadline or not job.tasks):
                reports.append(self._report(job_id, job, now))
        return reports

    def take_evicted(self) -> list[ChunkKey]:
        """Hand over the chunks that the medium let go of by itself, as far as it tells."""
        return self._tells.take_evicted() if self._tells else []

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads as far as they return, and close the store."""
        self._queue.close()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._store.close()

    def _start(self, job_id: int, tasks: list[Task], deadline: Deadline) -> None:
        self._jobs[job_id] = _Job(deadline, list(tasks))
        self._queue.put(tasks)

    def _end_task(self, result: _Result) -> list[IOReport]:
        task = result.task
        job = self._jobs[task.job_id]
        job.ended(task, result.ended)
        if not job.is_reported:
            job.outcome = job.outcome.merged(result.outcome)
            return [] if job.tasks else [self._report(task.job_id, job, result.ended)]
        if not job.tasks:
            del self._jobs[task.job_id]
        released = frozenset(task.keys)
        nothing: frozenset[ChunkKey] = frozenset()
        return [IOReport(task.job_id, TierOutcome(), nothing, released, nothing, 0.0, job.seconds)]

    def _report(self, job_id: int, job: _Job, now: float) -> IOReport:
        """Say how a job ended; what is still under way has run out of time."""
        given_up = [task for task in job.tasks if task.claim()]
        in_medium = [task for task in job.tasks if task not in given_up]
        hurried = [t for t in in_medium if now - (t.started or now) < PATIENCE_S]
        job.tasks = in_medium
        job.is_reported = True
        if not in_medium:
            del self._jobs[job_id]
        late = _keys(given_up) | _keys(in_medium)
        error = TierTimeout(self._name, "no answer by the deadline", late)
        return IOReport(
            job_id,
            job.outcome.merged(TierOutcome.all_failed(late, error)),
            held=_keys(in_medium),
            released=frozenset(),
            hurried=_keys(given_up) | _keys(hurried),
            slowest_s=job.slowest_s,
            seconds=job.seconds,
        )

    def _work(self, may_write: bool) -> None:  # noqa: FBT001 - a thread's argument
        """One thread: take a task, do it, say how it ended; until the queue closes."""
        while task := self._queue.take(may_write=may_write):
            if not task.claim():
                continue
            task.started = time.monotonic()
            outcome = _completed(self._do(task), task.keys, self._name)
            self._results.append(_Result(task, outcome, time.monotonic()))

    def _do(self, task: Task) -> TierOutcome:
        try:
            if task.verb is Verb.FIND:
                return self._store.find(task.keys, task.deadline)
            if task.verb is Verb.READ:
                return self._store.read(task.chunks, task.deadline)
            return self._store.write(task.chunks, task.deadline)
        except ClosedError:
            error: TierError = TierUnavailable(self._name, "closed", task.keys)
        except Exception as unexpected:  # noqa: BLE001 - a store's bug must not end the thread
            if not self._has_told:
                _log.exception("tier %s: unexpected error", self._name)
            self._has_told = True  # threads may race: then it is said twice
            error = TierUnavailable(self._name, f"unexpected {unexpected!r}", task.keys)
        return TierOutcome.all_failed(task.keys, error)


def _keys(tasks: Sequence[Task]) -> frozenset[ChunkKey]:
    return frozenset(key for task in tasks for key in task.keys)


def _fault(error: object, key: ChunkKey, name: str) -> TierError:
    """A store's error, whatever a store written elsewhere calls one."""
    if isinstance(error, TierError):
        return error
    return TierUnavailable(name, f"failed with {error!r}", [key])


def _completed(outcome: object, keys: Sequence[ChunkKey], name: str) -> TierOutcome:
    """An outcome with exactly one fact for each key, whatever the store came back with."""
    asked = frozenset(keys)
    if not isinstance(outcome, TierOutcome):
        error = TierUnavailable(name, f"answered with {type(outcome).__name__}", asked)
        return TierOutcome.all_failed(asked, error)
    failed = {k: _fault(error, k, name) for k, error in outcome.failed.items() if k in asked}
    absent = (outcome.absent & asked) - failed.keys()
    done = (outcome.done & asked) - failed.keys() - absent
    missing = asked - done - absent - failed.keys()
    if missing:
        failed |= dict.fromkeys(missing, TierUnavailable(name, "gave no answer", missing))
    return TierOutcome(done, absent, failed)
