"""S3-FIFO (Yang et al., SOSP 2023), by bytes and aware of prefixes.

New chunks stand in a small queue. Those used again while there move on to the main queue; the
others leave early, so that a scan passes through a tenth of the room, and their keys are remembered
for a while: who comes back in that time goes to the main queue at once.

Two rules are added for prefixes, which are worth more than their suffixes. A prefix is never newer
than what follows it, so it takes the same queue as a suffix that came back. And a prefix found
standing before its suffix in one queue is put behind it; use moves nothing else.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.policies.queues import Ghosts, LeaseAwareQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey

SMALL_SHARE: Final = 0.1
"""Part of all bytes that new chunks may be, while there are others to let go."""

MAX_USES: Final = 3
"""Uses are counted up to here; each saves a chunk of the main queue once."""


@dataclass(slots=True)
class _Place:
    """Where one chunk stands."""

    queue: LeaseAwareQueue
    turn: int
    """Later turns stand further back in their queue."""
    uses: int = 0
    """Uses not yet spent on staying, up to `MAX_USES`."""


class _Walk:
    """One batch, walked from its last tokens to its first."""

    def __init__(self) -> None:
        self.has_returned = False
        """Whether a chunk walked over was among the ghosts."""
        self._turns: dict[LeaseAwareQueue, int] = {}

    def pass_over(self, place: _Place) -> bool:
        """Go on to the next chunk; whether it stands before one of its suffixes."""
        turns = self._turns
        stands_before = place.turn < turns.get(place.queue, 0)
        if not stands_before:
            turns[place.queue] = place.turn
        return stands_before


class S3FifoPolicy:
    """Chunks leave first in, first out, but what was used again stays on.

    A chunk of the small queue needs one use to stay: a prefix has one when its suffix comes back
    from the ghosts, and so follows it to the main queue. Chunks of one batch with equal uses leave
    suffix first. A prefix can still leave first if it spent its uses in the main queue before the
    suffix came there; their next use together mends the order.

    `insert`, `touch` and `remove` are O(1) per key. `evict` is O(1) amortised: a chunk it passes
    over spends a use or changes queue, for which an earlier call has paid, and leased chunks cost
    what `LeaseAwareQueue` says. An `evict` that finds no victim has asked about every chunk.

    Args:
        capacity_bytes: what the tier holds; bounds what is remembered.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._ghost_limit_bytes = capacity_bytes
        self._small = LeaseAwareQueue()
        self._main = LeaseAwareQueue()
        self._ghosts = Ghosts()
        self._places: dict[ChunkKey, _Place] = {}
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ghost_bytes(self) -> int:
        """Bytes of the chunks that are only remembered; at most the capacity."""
        return self._ghosts.total_bytes

    def insert(self, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> None:
        """Follow these chunks, new or returned; a known key is touched."""
        walk = _Walk()
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            place = self._places.get(key)
            if place is None:
                walk.has_returned |= self._ghosts.forget(key)
                queue = self._main if walk.has_returned else self._small
                self._push(key, size, queue)
                walk.pass_over(self._places[key])
            else:
                self._use(key, place, walk)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Count a use of each; only a prefix that stood before its suffix changes its place."""
        walk = _Walk()
        for key in reversed(keys):
            place = self._places.get(key)
            if place is not None:
                self._use(key, place, walk)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Stop following these chunks and do not remember them; unknown keys are ignored."""
        for key in keys:
            place = self._places.pop(key, None)
            if place is not None:
                place.queue.discard(key)

    def evict(self, may_leave: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """Stop following the next chunk that may leave and has no use left to spend."""
        while found := self._pop(may_leave):
            key, size = found
            place = self._places.pop(key)
            if not place.uses:
                if place.queue is self._small:
                    self._ghosts.remember(key, size)
                    self._ghosts.trim(self._ghost_limit_bytes)
                return key
            # The uses in the small queue are the price of the main queue, where each counts anew.
            uses_left = place.uses - 1 if place.queue is self._main else 0
            self._push(key, size, self._main, uses=uses_left)
        return None

    def _pop(self, may_leave: Callable[[ChunkKey], bool]) -> tuple[ChunkKey, int] | None:
        # A share of what is there, not of the capacity: the same when the tier is full, and right
        # for one that is never quite full.
        small_bytes, main_bytes = self._small.total_bytes, self._main.total_bytes
        is_small_over = small_bytes > SMALL_SHARE * (small_bytes + main_bytes)
        first, second = (self._small, self._main) if is_small_over else (self._main, self._small)
        # All chunks that are cheap to ask about come before the long rows of leased ones.
        return (
            first.pop(may_leave)
            or second.pop(may_leave)
            or first.pop_aside(may_leave)
            or second.pop_aside(may_leave)
        )

    def _push(self, key: ChunkKey, size: int, queue: LeaseAwareQueue, uses: int = 0) -> None:
        self._places[key] = _Place(queue, next(self._turns), uses)
        queue.push(key, size)

    def _use(self, key: ChunkKey, place: _Place, walk: _Walk) -> None:
        place.uses = min(place.uses + 1, MAX_USES)
        if walk.pass_over(place):
            place.queue.move_last(key)
            place.turn = next(self._turns)
            walk.pass_over(place)
