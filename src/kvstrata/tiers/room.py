"""Room in an arena: who gets which bytes, without waste.

Chunks of hybrid groups differ in size by a factor of a thousand. Fixed slots would waste most of an
arena, one run of bytes per chunk would splinter it. So room is handed out as *extents*: runs of
pages, as few as possible, several when no single one is long enough. Nothing but the last page of
each chunk is ever lost, and any chunk that leaves makes room for any other.

The scheduler side decides; every rank has an arena of the same size and follows, so an extent means
the same on all of them.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from kvstrata.core.spans import ceil_div, whole_units

PAGE_BYTES: Final = 4096


class Extent(NamedTuple):
    """A run of pages in every rank's arena."""

    first_page: int
    num_pages: int

    @property
    def offset(self) -> int:
        """In bytes."""
        return self.first_page * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Whole pages."""
        return self.num_pages * PAGE_BYTES


class Room:
    """The free pages of an arena, best fit first. Scheduler thread only.

    Args:
        capacity_bytes: the arena's size; what does not fill a page is left out.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.num_pages = whole_units(capacity_bytes, PAGE_BYTES)
        self.free_pages = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: SortedList[tuple[int, int]] = SortedList()
        if self.num_pages:
            self.give_back([Extent(0, self.num_pages)])

    def take(self, num_bytes: int) -> tuple[Extent, ...] | None:
        """Take room; None when too little is free, and then nothing changes.

        The shortest run that fits is taken, so that long ones last; else the longest ones are
        put together.
        """
        wanted = ceil_div(num_bytes, PAGE_BYTES)
        if wanted > self.free_pages:
            return None
        taken: list[Extent] = []
        while wanted:
            extent = self._take_run(wanted)
            taken.append(extent)
            wanted -= extent.num_pages
        return tuple(taken)

    def give_back(self, extents: tuple[Extent, ...] | list[Extent]) -> None:
        """Return room; neighbours grow together."""
        for first, count in extents:
            start, end = first, first + count
            if start in self._by_end:
                start = self._remove(self._by_end[start]).first_page
            if end in self._by_start:
                end += self._remove(end).num_pages
            self._add(Extent(start, end - start))

    def check_invariants(self) -> None:
        """Assert that the three views of what is free agree. For tests and idle moments."""
        runs = sorted(self._by_start.items())
        assert [(size, start) for size, start in self._by_size] == sorted(
            (size, start) for start, size in runs
        )
        assert {start + size: start for start, size in runs} == self._by_end
        assert sum(size for _, size in runs) == self.free_pages <= self.num_pages
        for (start, size), (after, _) in itertools.pairwise(runs):
            assert start + size < after, "neighbours that did not grow together"

    def _take_run(self, wanted: int) -> Extent:
        index = self._by_size.bisect_left((wanted, -1))
        size, start = self._by_size[min(index, len(self._by_size) - 1)]
        self._remove(start)
        if size > wanted:
            self._add(Extent(start + wanted, size - wanted))
        return Extent(start, min(size, wanted))

    def _add(self, run: Extent) -> None:
        self._by_start[run.first_page] = run.num_pages
        self._by_end[run.first_page + run.num_pages] = run.first_page
        self._by_size.add((run.num_pages, run.first_page))
        self.free_pages += run.num_pages

    def _remove(self, start: int) -> Extent:
        size = self._by_start.pop(start)
        del self._by_end[start + size]
        self._by_size.remove((size, start))
        self.free_pages -= size
        return Extent(start, size)
