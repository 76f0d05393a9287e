"""The order in which free blocks are taken.

Every block that joins gets a place: a number that grows at the back and shrinks at the front.
Numbers are never used again, so a walk can go on behind a place that is empty by now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from collections.abc import Iterator


class FreeQueue:
    """Block ids by place."""

    def __init__(self) -> None:
        self._block_at: SortedDict[int, int] = SortedDict()
        self._place_of: dict[int, int] = {}
        self._back = 0
        self._front = -1

    def __len__(self) -> int:
        return len(self._place_of)

    def place(self, block_id: int) -> int | None:
        """Where a block stands; None: it is not in the queue."""
        return self._place_of.get(block_id)

    def append(self, block_id: int) -> None:
        """Join at the back."""
        self._put(block_id, self._back)
        self._back += 1

    def prepend(self, block_id: int) -> None:
        """Join at the front, to be taken next."""
        self._put(block_id, self._front)
        self._front -= 1

    def remove(self, block_id: int) -> None:
        """Leave, from anywhere."""
        del self._block_at[self._place_of.pop(block_id)]

    def pop(self) -> int:
        """Take the block at the front."""
        _, block_id = self._block_at.popitem(0)
        del self._place_of[block_id]
        return block_id

    def walk(self, after: int | None = None) -> Iterator[int]:
        """The blocks behind a place, or all; the queue may change during the walk."""
        places = self._block_at.keys()
        index = 0 if after is None else self._block_at.bisect_right(after)
        while index < len(places):
            place = places[index]
            yield self._block_at[place]
            index = self._block_at.bisect_right(place)

    def _put(self, block_id: int, place: int) -> None:
        assert block_id not in self._place_of, f"block {block_id} is free already"
        self._block_at[place] = block_id
        self._place_of[block_id] = place
