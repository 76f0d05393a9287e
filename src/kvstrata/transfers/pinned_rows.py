"""Rows on a GPU straight from and to pinned memory: one kernel for all chunks of a job and group.

The kernel reads and writes the arena over the bus, and no buffer or copy call stands between. So a
job costs a handful of calls, whatever its size: an engine that shares the interpreter with this
thread gives the lock away every few milliseconds at worst, and thousands of calls would wait for it
thousands of times.

A chunk may lie in several extents; the kernel finds each of its pages in a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvstrata.tiers.room import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy

_BLOCK: Final = 2048
"""Words that a program moves at a time."""
_PROGRAMS: Final = 128
"""Enough to keep the bus busy, few enough to leave the GPU to the engine."""
_WARPS: Final = 8


@triton.jit(do_not_specialize=list(range(13)))  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917
    piece_address,  # noqa: ANN001
    piece_stride,  # noqa: ANN001
    piece_words,  # noqa: ANN001
    piece_before,  # noqa: ANN001
    unit_row,  # noqa: ANN001
    unit_index,  # noqa: ANN001
    unit_rows,  # noqa: ANN001
    unit_pages,  # noqa: ANN001
    pages,  # noqa: ANN001
    arena_address,  # noqa: ANN001
    num_pieces,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    num_tasks,  # noqa: ANN001
    is_load: tl.constexpr,
    word: tl.constexpr,
    page_words: tl.constexpr,
    block: tl.constexpr,
):
    """A unit is one row of one chunk; a task is a part of one piece of a unit."""
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        piece = (task // num_blocks) % num_pieces
        unit = task // (num_blocks * num_pieces)
        words = tl.load(piece_words + piece)
        place = (task % num_blocks).to(tl.int64) * block + tl.arange(0, block)
        is_inside = place < words
        row = tl.load(unit_row + unit) * tl.load(piece_stride + piece)
        device = tl.load(piece_address + piece).to(tl.pointer_type(word)) + row + place
        before = tl.load(piece_before + piece) * tl.load(unit_rows + unit)
        payload = before + tl.load(unit_index + unit) * words + place
        table = pages + tl.load(unit_pages + unit)
        page = tl.load(table + payload // page_words, mask=is_inside, other=0)
        host = arena_address.to(tl.pointer_type(word)) + page * page_words + payload % page_words
        if is_load:
            tl.store(device, tl.load(host, mask=is_inside), mask=is_inside)
        else:
            tl.store(host, tl.load(device, mask=is_inside), mask=is_inside)


class _Pieces(NamedTuple):
    """A group's pieces, as the kernel wants them."""

    table: torch.Tensor
    """Addresses, strides, words of a row, and words of a row in the pieces before."""
    row_bytes: int
    num_pieces: int
    num_blocks: int
    word: Any
    word_bytes: int


class PinnedRows:
    """Moves chunks of each group with one kernel, on the current stream.

    Args:
        views: the engine's caches, on a GPU.
        arena: the rank's memory for chunks, pinned.
    """

    def __init__(self, views: CacheViews, arena: HostArena) -> None:
        self._device = views.device
        self._views = views  # keeps the memory alive
        self._arena_address = arena.address
        self._groups = [self._pieces(pieces) for pieces in views.pieces]
        self._compile()

    def load(self, copies: Sequence[ChunkCopy]) -> None:
        """From the arena into the caches; returns before the bytes are there."""
        self._move(copies, is_load=True)

    def store(self, copies: Sequence[ChunkCopy]) -> None:
        """From the caches into the arena; returns before the bytes are there."""
        self._move(copies, is_load=False)

    def _compile(self) -> None:
        """Now, so that the first request does not wait for it."""
        nothing = torch.zeros((5, 1), dtype=torch.int64, device=self._device)
        for pieces in self._groups:
            for is_load in (True, False):
                self._start(pieces, nothing, 0, is_load=is_load)

    def _move(self, copies: Sequence[ChunkCopy], *, is_load: bool) -> None:
        for group_id, pieces in enumerate(self._groups):
            mine = [copy for copy in copies if copy.group_id == group_id]
            if mine:
                self._launch(pieces, mine, is_load=is_load)

    def _launch(self, pieces: _Pieces, copies: list[ChunkCopy], *, is_load: bool) -> None:
        units, pages = _units(copies, pieces.row_bytes), _page_table(copies)
        num_units = units.shape[1]
        sent = torch.from_numpy(np.concatenate([units.reshape(-1), pages])).to(self._device)
        tables = [*sent[: units.size].view(4, num_units), sent[units.size :]]
        num_tasks = num_units * pieces.num_pieces * pieces.num_blocks
        self._start(pieces, tables, num_tasks, is_load=is_load)

    def _start(
        self, pieces: _Pieces, tables: Iterable[torch.Tensor], num_tasks: int, *, is_load: bool
    ) -> None:
        """Put the kernel on the stream.

        Args:
            pieces: the group's.
            tables: of units and pages, as `_units` and `_page_table` make them.
            num_tasks: parts of pieces of units.
            is_load: which way.
        """
        _move_rows[(_PROGRAMS,)](
            *pieces.table,
            *tables,
            self._arena_address,
            pieces.num_pieces,
            pieces.num_blocks,
            num_tasks,
            is_load=is_load,
            word=pieces.word,
            page_words=PAGE_BYTES // pieces.word_bytes,
            block=_BLOCK,
            num_warps=_WARPS,
        )

    def _pieces(self, pieces: Sequence[torch.Tensor]) -> _Pieces:
        numbers = [n for p in pieces for n in (p.shape[1], p.stride(0), p.data_ptr())]
        word, size = (tl.int64, 8) if not any(n % 8 for n in numbers) else (tl.uint8, 1)
        words = [piece.shape[1] // size for piece in pieces]
        table = torch.tensor(
            [
                [piece.data_ptr() for piece in pieces],
                [piece.stride(0) // size for piece in pieces],
                words,
                [sum(words[:place]) for place in range(len(words))],
            ],
            dtype=torch.int64,
            device=self._device,
        )
        blocks = triton.cdiv(max(words), _BLOCK)
        return _Pieces(table, sum(words) * size, len(pieces), blocks, word, size)


def _units(copies: Iterable[ChunkCopy], row_bytes: int) -> NDArray[np.int64]:
    """For every row to move: its place on the device, in its payload, of how many, and its table.

    Raises:
        ValueError: a payload has not so many rows, or not whole ones.
    """
    parts, first_page = [], 0
    for copy in copies:
        num_rows, rest = divmod(copy.payload_bytes, row_bytes)
        if rest or copy.first_row + len(copy.rows) > num_rows:
            raise ValueError(f"payload of {copy.payload_bytes} bytes, rows of {row_bytes}")
        part = np.empty((4, len(copy.rows)), dtype=np.int64)
        part[0] = copy.rows
        part[1] = np.arange(copy.first_row, copy.first_row + len(copy.rows))
        part[2], part[3] = num_rows, first_page
        parts.append(part)
        first_page += sum(extent.num_pages for extent in copy.extents)
    return np.concatenate(parts, axis=1)


def _page_table(copies: Iterable[ChunkCopy]) -> NDArray[np.int64]:
    """The arena's pages of every chunk, in the order of its payload."""
    return np.concatenate(
        [
            np.arange(extent.first_page, extent.first_page + extent.num_pages, dtype=np.int64)
            for copy in copies
            for extent in copy.extents
        ]
    )
