"""Rows on a GPU through a buffer there, with tensor operations: works with any memory.

    store    rows -> one payload on the device -> the arena
    load     the arena -> one payload on the device -> rows

One buffer serves all chunks of a direction: what a stream does is in order, and each direction has
a stream of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy

_WIDE: Final = torch.int64
"""Rows are moved in words of this, where they can be: kernels work element by element."""


class StagedRows:
    """Moves chunks one by one, on the current stream, always the same for loads and for stores.

    Args:
        views: the engine's caches, on a GPU.
        arena: the rank's memory for chunks.
    """

    def __init__(self, views: CacheViews, arena: HostArena) -> None:
        self._device = views.device
        self._arena = arena
        self._groups = [_widened(pieces) for pieces in views.pieces]
        self._load_buffer = self._store_buffer = self._make_buffer(0)

    def load(self, copies: Sequence[ChunkCopy]) -> None:
        """From the arena into the caches; returns before the bytes are there."""
        self._load_buffer = self._grown(self._load_buffer, copies)
        for copy, index in self._indexed(copies):
            payload = self._load_buffer[: copy.payload_bytes]
            done = 0
            for part in self._parts(copy):
                payload[done : done + part.numel()].copy_(part, non_blocking=True)
                done += part.numel()
            stop = copy.first_row + len(copy.rows)
            for piece, rows in self._by_piece(copy, payload):
                piece.index_copy_(0, index, rows[copy.first_row : stop])

    def store(self, copies: Sequence[ChunkCopy]) -> None:
        """From the caches into the arena; returns before the bytes are there."""
        self._store_buffer = self._grown(self._store_buffer, copies)
        for copy, index in self._indexed(copies):
            payload = self._store_buffer[: copy.payload_bytes]
            for piece, rows in self._by_piece(copy, payload):
                torch.index_select(piece, 0, index, out=rows)
            done = 0
            for part in self._parts(copy):
                part.copy_(payload[done : done + part.numel()], non_blocking=True)
                done += part.numel()

    def _indexed(self, copies: Sequence[ChunkCopy]) -> zip[tuple[ChunkCopy, torch.Tensor]]:
        """Chunks with their rows on the device, sent there at once."""
        numbers = [row for copy in copies for row in copy.rows]
        rows = torch.tensor(numbers, dtype=torch.int64, pin_memory=True)
        rows = rows.to(self._device, non_blocking=True)
        return zip(copies, rows.split([len(copy.rows) for copy in copies]), strict=True)

    def _by_piece(
        self, copy: ChunkCopy, payload: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A group's pieces, each with its rows in a payload."""
        pieces = self._groups[copy.group_id]
        num_rows = payload.numel() // sum(_row_bytes(piece) for piece in pieces)
        parts = payload.split([num_rows * _row_bytes(piece) for piece in pieces])
        return [
            (piece, part.view(piece.dtype).view(num_rows, -1))
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def _grown(self, buffer: torch.Tensor, copies: Sequence[ChunkCopy]) -> torch.Tensor:
        """Room on the device for the largest payload; what is dropped, this stream may reuse."""
        largest = max(copy.payload_bytes for copy in copies)
        return buffer if buffer.numel() >= largest else self._make_buffer(largest)

    def _make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _parts(self, copy: ChunkCopy) -> list[torch.Tensor]:
        """The chunk's memory, cut to its payload."""
        parts, left = [], copy.payload_bytes
        for view in self._arena.parts(copy.extents):
            parts.append(torch.frombuffer(view, dtype=torch.uint8)[:left])
            left -= parts[-1].numel()
        return parts


def _widened(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A group's pieces in words, if all of them can be."""
    size = _WIDE.itemsize
    are_wide = all(
        piece.shape[1] % size == 0 and piece.stride(0) % size == 0 and piece.data_ptr() % size == 0
        for piece in pieces
    )
    return [piece.view(_WIDE) for piece in pieces] if are_wide else list(pieces)


def _row_bytes(piece: torch.Tensor) -> int:
    return piece.shape[1] * piece.element_size()
