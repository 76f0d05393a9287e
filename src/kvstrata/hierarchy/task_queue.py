"""Tasks for a tier's threads: reads before writes, and always a thread for reads.

Ownership: a task's fields are fixed but for its claim, which exactly one side gets: the thread that
does the task, or the owner who gives it up. The queue's lists belong to whoever holds its lock.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline


class Verb(IntEnum):
    """What is asked of a tier."""

    FIND = 0
    READ = 1
    WRITE = 2


@dataclass(slots=True, eq=False)
class Task:
    """A part of a job that one thread does."""

    job_id: int
    verb: Verb
    chunks: tuple[ChunkBuffer, ...]
    keys: tuple[ChunkKey, ...]
    deadline: Deadline
    started: float | None = None
    """When a thread began with it."""
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Take the task, to do it or to give it up; whether nobody else had."""
        return self._claim.acquire(blocking=False)


class TaskQueue:
    """What waits for a thread."""

    def __init__(self) -> None:
        self._reads: deque[Task] = deque()
        self._writes: deque[Task] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, tasks: list[Task]) -> None:
        """Add tasks behind those of their kind."""
        with self._changed:
            for task in tasks:
                (self._writes if task.verb is Verb.WRITE else self._reads).append(task)
            self._changed.notify_all()

    def take(self, *, may_write: bool) -> Task | None:
        """Wait for a task; None when the queue was closed."""
        with self._changed:
            while not self._is_closed:
                if self._reads:
                    return self._reads.popleft()
                if self._writes and may_write:
                    return self._writes.popleft()
                self._changed.wait()
            return None

    def close(self) -> None:
        """Let all who wait go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
