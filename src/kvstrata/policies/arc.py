"""ARC (Megiddo and Modha, FAST 2003), by bytes and aware of prefixes.

Chunks used once and chunks used more often stand in two queues, each least recent first. What left
either is remembered for a while. A chunk that comes back shows which queue was too short, and moves
the target: the bytes that chunks used once may fill.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.policies.queues import Ghosts, LeaseAwareQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey


class ArcPolicy:
    """Recency against frequency, in the proportion that would have served lately.

    A prefix is never newer than what follows it: when a chunk comes back, the unknown chunks before
    it in the batch count as used more often too.

    `insert`, `touch` and `remove` are O(1) amortised per key; `evict` is O(1) amortised, with
    leased chunks costing what `LeaseAwareQueue` says. An `evict` that finds no victim has asked
    about every chunk.

    Args:
        capacity_bytes: what the tier holds; bounds the target and what is remembered.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._target_bytes = 0
        self._once = LeaseAwareQueue()
        self._often = LeaseAwareQueue()
        self._once_ghosts = Ghosts()
        self._often_ghosts = Ghosts()

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    @property
    def ghost_bytes(self) -> int:
        """Bytes of the chunks that are only remembered; at most the capacity."""
        return self._once_ghosts.total_bytes + self._often_ghosts.total_bytes

    @property
    def target_bytes(self) -> int:
        """Bytes that chunks used once may fill, while there are others to let go."""
        return self._target_bytes

    def insert(self, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> None:
        """Follow these chunks, new or returned; a known key is touched."""
        has_returned = False
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            if self._use(key):
                continue
            has_returned |= self._learn_from(key, size)
            queue = self._often if has_returned else self._once
            queue.push(key, size)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make these the most recent of those used often, the prefix last of all."""
        for key in reversed(keys):
            self._use(key)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Stop following these chunks and do not remember them; unknown keys are ignored."""
        for key in keys:
            if self._once.discard(key) is None:
                self._often.discard(key)

    def evict(self, may_leave: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """Stop following the least recent chunk that may leave, of the queue above its target."""
        once, often = (self._once, self._once_ghosts), (self._often, self._often_ghosts)
        is_once_over = self._once.total_bytes > self._target_bytes
        order = (once, often) if is_once_over else (often, once)
        # All chunks that are cheap to ask about come before the long rows of leased ones.
        for pop in (LeaseAwareQueue.pop, LeaseAwareQueue.pop_aside):
            for queue, ghosts in order:
                if found := pop(queue, may_leave):
                    ghosts.remember(*found)
                    self._trim_ghosts()
                    return found[0]
        return None

    def _use(self, key: ChunkKey) -> bool:
        """Note a use of a chunk; whether it is followed at all."""
        if key in self._often:
            self._often.move_last(key)
            return True
        size = self._once.discard(key)
        if size is None:
            return False
        self._often.push(key, size)
        return True

    def _learn_from(self, key: ChunkKey, size: int) -> bool:
        """Move the target if a chunk comes back; whether it does.

        The rarer ghosts are on one side, the more a return from there says.
        """
        once, often = self._once_ghosts, self._often_ghosts
        if key in once:
            step = size * max(1, often.total_bytes // once.total_bytes)
            self._target_bytes = min(self._capacity_bytes, self._target_bytes + step)
            return once.forget(key)
        if key in often:
            step = size * max(1, once.total_bytes // often.total_bytes)
            self._target_bytes = max(0, self._target_bytes - step)
            return often.forget(key)
        return False

    def _trim_ghosts(self) -> None:
        """Remember at most the capacity in all, and with the queue at most that of those once."""
        capacity = self._capacity_bytes
        self._once_ghosts.trim(max(0, capacity - self._once.total_bytes))
        self._often_ghosts.trim(capacity - self._once_ghosts.total_bytes)
