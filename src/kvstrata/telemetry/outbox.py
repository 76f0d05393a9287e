"""Batches that wait to be sent, each with its number in the stream.

Numbers start at 0 and are given when a batch is put in. If there is no room for it, it is dropped,
and readers see it as a gap. The gap must show even if nothing follows, so a dropped batch takes two
numbers: its own, which is never sent, and one for an empty batch that is sent when all that waited
has been.

Ownership: `put` belongs to one thread, with `_next_number` and `num_dropped`; `take` to another,
with `_last_taken`. A batch is in the queue before its number is passed, so a number below
`_next_number` that is not in the queue was taken or dropped.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.telemetry.kv_events import KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.telemetry.kv_events import KVEvent


class OutgoingBatch(NamedTuple):
    """A batch and its number in the stream."""

    number: int
    batch: KVEventBatch


class Outbox:
    """A bounded queue between the thread that has events and the thread that sends them.

    Args:
        max_batches: how many may wait.
        data_parallel_rank: whose events these are.
        clock: seconds since the epoch.
    """

    def __init__(
        self, max_batches: int, data_parallel_rank: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self.num_dropped = 0
        """Batches for which there was no room."""
        self._max_batches = max_batches
        self._rank = data_parallel_rank
        self._clock = clock
        self._queue: deque[OutgoingBatch] = deque()
        self._next_number = 0
        self._last_taken = -1

    def put(self, events: Sequence[KVEvent]) -> None:
        """Number a batch of these events and let it wait, or drop it. Never blocks."""
        if len(self._queue) >= self._max_batches:
            self.num_dropped += 1
            self._next_number += 2
            return
        self._queue.append(OutgoingBatch(self._next_number, self._batch(events)))
        self._next_number += 1

    def take(self) -> OutgoingBatch | None:
        """The next batch to send; None: there is none. Never blocks."""
        end = self._next_number  # read before the queue: all below it is in there, or never will be
        try:
            outgoing = self._queue.popleft()
        except IndexError:
            if self._last_taken >= end - 1:
                return None
            outgoing = OutgoingBatch(end - 1, self._batch(()))
        self._last_taken = outgoing.number
        return outgoing

    def _batch(self, events: Sequence[KVEvent]) -> KVEventBatch:
        return KVEventBatch(self._clock(), tuple(events), self._rank)
