"""Least recently used.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.policies.queues import LeaseAwareQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey


class LruPolicy:
    """The chunk unused for longest leaves first; of one use, the last tokens first.

    All calls are O(1) amortised per key, but an `evict` that finds no victim has asked about every
    chunk.

    Args:
        capacity_bytes: not used; all policies are made in the same way.
    """

    def __init__(self, capacity_bytes: int) -> None:
        del capacity_bytes
        self._queue = LeaseAwareQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> None:
        """Follow these chunks as the most recent ones; a known key is touched."""
        queue = self._queue
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            if key in queue:
                queue.move_last(key)
            else:
                queue.push(key, size)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make these the most recent, the prefix last of all."""
        queue = self._queue
        for key in reversed(keys):
            if key in queue:
                queue.move_last(key)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Stop following these chunks; unknown keys are ignored."""
        for key in keys:
            self._queue.discard(key)

    def evict(self, may_leave: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """Stop following the least recent chunk that may leave."""
        found = self._queue.pop(may_leave) or self._queue.pop_aside(may_leave)
        return found[0] if found else None
