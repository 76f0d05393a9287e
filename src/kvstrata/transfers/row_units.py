"""Chunks as tables of numbers, for a kernel that moves all their rows at once.

A unit is one row of one chunk. Where the chunk starts is a place in the arena, or, for one that
lies in several extents, a place in a table of pages.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstrata.transfers.copy_queue import ChunkCopy


def row_units(
    copies: Sequence[ChunkCopy], starts: Sequence[int], row_bytes: int
) -> NDArray[np.int64]:
    """For every row to move: its place on the device, in its payload, of how many, and the start.

    Args:
        copies: chunks of one group.
        starts: of each chunk, which its rows share.
        row_bytes: of the group.

    Raises:
        ValueError: a payload has not so many rows, or not whole ones.
    """
    for copy in copies:
        num_rows, rest = divmod(copy.payload_bytes, row_bytes)
        if rest or copy.first_row + len(copy.rows) > num_rows:
            raise ValueError(f"payload of {copy.payload_bytes} bytes, rows of {row_bytes}")
    counts = np.array([len(copy.rows) for copy in copies], dtype=np.int64)
    first_rows = np.array([copy.first_row for copy in copies], dtype=np.int64)
    units = np.empty((4, counts.sum()), dtype=np.int64)
    units[0] = np.fromiter(chain.from_iterable(copy.rows for copy in copies), dtype=np.int64)
    units[1] = np.arange(units.shape[1])
    units[1] += np.repeat(first_rows - counts.cumsum() + counts, counts)
    units[2] = np.repeat([copy.payload_bytes // row_bytes for copy in copies], counts)
    units[3] = np.repeat(starts, counts)
    return units


def page_table(copies: Iterable[ChunkCopy]) -> tuple[list[NDArray[np.int64]], list[int]]:
    """The arena's pages of all chunks in the order of their payloads, and where each begins."""
    parts, starts, num_pages = [], [], 0
    for copy in copies:
        starts.append(num_pages)
        for extent in copy.extents:
            stop = extent.first_page + extent.num_pages
            parts.append(np.arange(extent.first_page, stop, dtype=np.int64))
            num_pages += extent.num_pages
    return parts, starts
