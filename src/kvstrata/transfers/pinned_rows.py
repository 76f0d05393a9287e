"""Rows on a GPU straight from and to pinned memory: one kernel for all chunks of a job and group.

The kernel reads and writes the arena over the bus, and no buffer or copy call stands between. So a
job costs a handful of calls, whatever its size, and the engine's thread can make them.

Most chunks lie in one extent, at a distance from the arena's beginning. For one that lies in
several, the kernel finds each of its pages in a table, which is slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvstrata.tiers.room import PAGE_BYTES
from kvstrata.transfers.row_units import page_table, row_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy

_BLOCK: Final = 2048
"""Words that a program moves at a time."""
_PROGRAMS: Final = 32
"""Enough to keep the bus busy, few enough to leave most of the GPU to the engine."""
_WARPS: Final = 8
_WORD_BYTES: Final = 8
_VECTOR_WORDS: Final = 2
"""Words that a thread moves at once, if everything is a multiple of so many."""


@triton.jit(do_not_specialize=list(range(12)))  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917
    piece_address,  # noqa: ANN001
    piece_stride,  # noqa: ANN001
    piece_words,  # noqa: ANN001
    piece_before,  # noqa: ANN001
    unit_row,  # noqa: ANN001
    unit_index,  # noqa: ANN001
    unit_rows,  # noqa: ANN001
    unit_start,  # noqa: ANN001
    pages,  # noqa: ANN001
    arena_address,  # noqa: ANN001
    num_units,  # noqa: ANN001
    num_tasks,  # noqa: ANN001
    num_blocks: tl.constexpr,
    is_load: tl.constexpr,
    is_paged: tl.constexpr,
    word: tl.constexpr,
    vector: tl.constexpr,
    align: tl.constexpr,
    page_words: tl.constexpr,
    block: tl.constexpr,
):
    """A unit is one row of one chunk; a task is a part of one piece of a unit."""
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        unit = (task // num_blocks) % num_units
        piece = task // (num_blocks * num_units)
        words = tl.multiple_of(tl.load(piece_words + piece), vector)
        place = (task % num_blocks).to(tl.int64) * block + tl.arange(0, block)
        is_inside = place < words
        row = tl.load(unit_row + unit) * tl.load(piece_stride + piece)
        device = tl.load(piece_address + piece).to(tl.pointer_type(word)) + row
        before = tl.load(piece_before + piece) * tl.load(unit_rows + unit)
        payload = before + tl.load(unit_index + unit) * words
        start = tl.load(unit_start + unit)
        arena = arena_address.to(tl.pointer_type(word))
        if is_paged:
            of_payload = payload + place
            page = tl.load(pages + start + of_payload // page_words, mask=is_inside, other=0)
            host = arena + page * page_words + of_payload % page_words
        else:
            host = tl.multiple_of(arena + start + payload, align) + place
        here = tl.multiple_of(device, align) + place
        if is_load:
            tl.store(here, tl.load(host, mask=is_inside), mask=is_inside)
        else:
            tl.store(host, tl.load(here, mask=is_inside), mask=is_inside)


class _Pieces(NamedTuple):
    """A group's pieces, as the kernel wants them."""

    table: torch.Tensor
    """Addresses, strides, words of a row, and words of a row in the pieces before."""
    row_bytes: int
    num_pieces: int
    num_blocks: int
    word: Any
    word_bytes: int
    vector_words: int


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
        nothing = np.empty((4, 0), dtype=np.int64)
        for pieces in self._groups:
            for is_load in (True, False):
                for pages in ([], [nothing[0]]):
                    self._start(pieces, nothing, pages, is_load=is_load)

    def _move(self, copies: Sequence[ChunkCopy], *, is_load: bool) -> None:
        for group_id, pieces in enumerate(self._groups):
            mine = [copy for copy in copies if copy.group_id == group_id]
            whole = [copy for copy in mine if len(copy.extents) == 1]
            if whole:
                starts = [copy.extents[0].offset // pieces.word_bytes for copy in whole]
                units = row_units(whole, starts, pieces.row_bytes)
                self._start(pieces, units, [], is_load=is_load)
            if scattered := [copy for copy in mine if len(copy.extents) > 1]:
                pages, starts = page_table(scattered)
                units = row_units(scattered, starts, pieces.row_bytes)
                self._start(pieces, units, pages, is_load=is_load)

    def _start(
        self,
        pieces: _Pieces,
        units: NDArray[np.int64],
        pages: list[NDArray[np.int64]],
        *,
        is_load: bool,
    ) -> None:
        """Put the kernel on the stream.

        Args:
            pieces: the group's.
            units: as `row_units` makes them.
            pages: parts of the table that units start in; none: they start in the arena.
            is_load: which way.
        """
        num_units = units.shape[1]
        tables = self._send([units.reshape(-1), *pages])
        _move_rows[(_PROGRAMS,)](
            *pieces.table,
            *tables[: units.size].view(4, num_units),
            tables[units.size :],
            self._arena_address,
            num_units,
            num_units * pieces.num_pieces * pieces.num_blocks,
            num_blocks=pieces.num_blocks,
            is_load=is_load,
            is_paged=bool(pages),
            word=pieces.word,
            vector=pieces.vector_words,
            align=pieces.vector_words * pieces.word_bytes,
            page_words=PAGE_BYTES // pieces.word_bytes,
            block=_BLOCK,
            num_warps=_WARPS,
        )

    def _send(self, parts: list[NDArray[np.int64]]) -> torch.Tensor:
        """Numbers to the device, without waiting: out of pinned memory, that PyTorch keeps."""
        sent = torch.empty(sum(map(len, parts)), dtype=torch.int64, pin_memory=True)
        np.concatenate(parts, out=sent.numpy())
        return sent.to(self._device, non_blocking=True)

    def _pieces(self, pieces: Sequence[torch.Tensor]) -> _Pieces:
        numbers = [n for p in pieces for n in (p.shape[1], p.stride(0), p.data_ptr())]
        word, size, vector = tl.uint8, 1, 1
        if not any(n % _WORD_BYTES for n in numbers):
            word, size = tl.int64, _WORD_BYTES
            vector = 1 if any(n % (size * _VECTOR_WORDS) for n in numbers) else _VECTOR_WORDS
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
        return _Pieces(table, sum(words) * size, len(pieces), blocks, word, size, vector)
