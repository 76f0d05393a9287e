"""The two structures that policies are made of: a queue that respects leases, and a memory.

A policy is asked for victims while requests hold leases, and nobody tells it when a lease ends. So
`LeaseAwareQueue` sets chunks that may not leave aside, in their order, and asks about them again at
a rate that the number of calls pays for.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.core.ids import ChunkKey

ASKS_PER_POP: Final = 64
"""Chunks set aside that one `pop` pays to ask about again; up to so many, no place is late."""


class LeaseAwareQueue:
    """Chunks in the order in which they leave, with their bytes.

    Chunks that were found leased are set aside; they all stand before the chunks that wait, and a
    search always begins at the first of them, so none loses its place. A search through `n` chunks
    set aside happens on every call up to `ASKS_PER_POP` of them, and else once in
    `n / ASKS_PER_POP` calls: a `pop` is O(1) amortised, however long the row of leased chunks, and
    a chunk whose lease has ended is noticed that many calls late at most.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        """Bytes of all chunks in the queue."""
        # Ordered dicts, because taking the first of a plain dict walks over all removed before it.
        self._aside: OrderedDict[ChunkKey, int] = OrderedDict()
        self._waiting: OrderedDict[ChunkKey, int] = OrderedDict()
        self._asks_left = 0

    def __len__(self) -> int:
        return len(self._aside) + len(self._waiting)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting or key in self._aside

    def push(self, key: ChunkKey, size: int) -> None:
        """Put a chunk that is not in the queue last."""
        self._waiting[key] = size
        self.total_bytes += size

    def move_last(self, key: ChunkKey) -> None:
        """Make a chunk of the queue the last to leave."""
        if key in self._waiting:
            self._waiting.move_to_end(key)
        else:
            self._waiting[key] = self._aside.pop(key)

    def discard(self, key: ChunkKey) -> int | None:
        """Take a chunk out of the queue; its size, or None if it was not there."""
        size = self._waiting.pop(key, None)
        if size is None:
            size = self._aside.pop(key, None)
        if size is not None:
            self.total_bytes -= size
        return size

    def pop(self, may_leave: Callable[[ChunkKey], bool]) -> tuple[ChunkKey, int] | None:
        """Take out the first chunk that may leave, and its size.

        None does not mean that none may: chunks set aside are not asked about every time. Only
        `pop_aside` knows.
        """
        self._asks_left = min(self._asks_left + ASKS_PER_POP, len(self._aside))
        if self._asks_left == len(self._aside):
            found = self.pop_aside(may_leave)
            if found is not None:
                return found
        while self._waiting:
            key, size = self._waiting.popitem(last=False)
            if may_leave(key):
                self.total_bytes -= size
                return key, size
            self._aside[key] = size
        return None

    def pop_aside(self, may_leave: Callable[[ChunkKey], bool]) -> tuple[ChunkKey, int] | None:
        """Take out the first chunk set aside that may leave now, and its size; asks about all."""
        for num_asked, key in enumerate(self._aside, start=1):
            if may_leave(key):
                self._asks_left = max(0, self._asks_left - num_asked)
                size = self._aside.pop(key)
                self.total_bytes -= size
                return key, size
        # A search in vain uses up what was saved: the next one is as far away as it is expensive.
        self._asks_left = 0
        return None


class Ghosts:
    """Keys of chunks that have left, oldest first, bounded by the bytes those chunks had."""

    def __init__(self) -> None:
        self.total_bytes = 0
        """Bytes that the remembered chunks had."""
        self._sizes: OrderedDict[ChunkKey, int] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def remember(self, key: ChunkKey, size: int) -> None:
        """Put a key last."""
        self._sizes[key] = size
        self.total_bytes += size

    def forget(self, key: ChunkKey) -> bool:
        """Drop a key; whether it was remembered."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.total_bytes -= size
        return True

    def trim(self, limit_bytes: int) -> None:
        """Drop the oldest until at most so many bytes are remembered."""
        while self._sizes and self.total_bytes > limit_bytes:
            _, size = self._sizes.popitem(last=False)
            self.total_bytes -= size
