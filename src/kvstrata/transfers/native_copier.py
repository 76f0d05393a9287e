"""Copies with one native call per chunk, for caches in host memory.

Tensor operations take the interpreter's lock once for every piece, and an engine in the same
process waits for it. A native call takes it once for the whole chunk.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvstrata.core.canonical import CanonicalKVCaches, GroupPages
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy

_PIECE: Final = struct.Struct("=qqq")
"""Address of the first row, distance of rows, bytes of a row."""


class RowCalls(Protocol):
    """What the native module offers.

    Pieces are packed and describe memory that is there. Parts hold the payload, one after the
    other. Calls block, without the interpreter's lock; a bad argument moves no byte.
    """

    def load(
        self,
        pieces: bytes,
        num_rows: int,
        rows: tuple[int, ...],
        parts: tuple[memoryview, ...],
        num_bytes: int,
        first_row: int,
        /,
    ) -> None:
        """Copy rows of a payload into the caches' rows, from the payload's `first_row` on.

        Raises:
            IndexError: a row is not one of `num_rows`.
            ValueError: the payload has not so many rows, not whole ones, or is not in the parts.
        """
        ...

    def store(
        self,
        pieces: bytes,
        num_rows: int,
        rows: tuple[int, ...],
        parts: tuple[memoryview, ...],
        num_bytes: int,
        first_row: int,
        /,
    ) -> None:
        """Copy the caches' rows into a payload of exactly these.

        Raises:
            IndexError: a row is not one of `num_rows`.
            ValueError: the payload has another size, or the parts have no room for it.
        """
        ...


class _Pages(NamedTuple):
    """Where a group's rows lie, as native calls want it."""

    pieces: bytes
    num_rows: int


class NativeCopier:
    """Moves chunks one by one, each with one call.

    Args:
        views: the engine's caches, in host memory.
        arena: the rank's memory for chunks.
        calls: the native module.
    """

    def __init__(self, views: CacheViews, arena: HostArena, calls: RowCalls) -> None:
        assert views.device.type == "cpu", "native calls reach host memory alone"
        self._views = views  # keeps the memory alive
        self._arena = arena
        self._calls = calls
        self._groups = [_pages(views.canonical, pages) for pages in views.canonical.groups]

    def load(self, copy: ChunkCopy) -> None:
        """From the arena into the caches."""
        self._calls.load(
            *self._groups[copy.group_id],
            copy.rows,
            self._arena.parts(copy.extents),
            copy.payload_bytes,
            copy.first_row,
        )

    def store(self, copy: ChunkCopy) -> None:
        """From the caches into the arena."""
        self._calls.store(
            *self._groups[copy.group_id],
            copy.rows,
            self._arena.parts(copy.extents),
            copy.payload_bytes,
            0,
        )


def native_calls() -> RowCalls | None:
    """The native module; None where there was no compiler to build it with."""
    try:
        from kvstrata.transfers import _row_copy  # noqa: PLC0415 - may not be there
    except ImportError:
        return None
    return _row_copy


def _pages(caches: CanonicalKVCaches, pages: GroupPages) -> _Pages:
    matrices = [caches.matrices[piece.matrix] for piece in pages.pieces]
    packed = b"".join(
        _PIECE.pack(matrix.storage + matrix.offset + piece.start, matrix.row_stride, piece.length)
        for piece, matrix in zip(pages.pieces, matrices, strict=True)
    )
    return _Pages(packed, min(matrix.num_rows for matrix in matrices))
