"""From chunks and block tables to rows: what exactly a copy moves. Pure, and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind
from kvstrata.transfers.copy_queue import ChunkCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.core.chunk_grid import ChunkGrid, GroupChunks
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.spans import RowSpan, TokenSpan
    from kvstrata.planning.load_plan import LoadPlan
    from kvstrata.planning.request_ledger import ChunkRef
    from kvstrata.tiers.room import Extent

    ExtentsOf = Callable[[ChunkKey], tuple[Extent, ...]]

NULL_BLOCK: Final = 0


def device_rows(block_table: Sequence[int], rows: RowSpan, rows_per_block: int) -> list[int]:
    """Where a request's rows lie in the cache, given its block table of that group."""
    return [
        block_table[row // rows_per_block] * rows_per_block + row % rows_per_block for row in rows
    ]


def load_copies(
    grid: ChunkGrid, plan: LoadPlan, tables: Sequence[Sequence[int]], extents_of: ExtentsOf
) -> Iterator[ChunkCopy]:
    """The copies of a hit: of each chunk the rows that the hit needs and the request has room for.

    Args:
        grid: the request's chunks.
        plan: the hit.
        tables: the request's blocks, by group.
        extents_of: where a chunk rests in the arena.
    """
    for load in plan.loads:
        chunks = grid.geometry.groups[load.group_id]
        for index in load.chunks:
            key = grid.key(load.group_id, index)
            rows = _rows_to_load(chunks, index, load.tokens, tables[load.group_id])
            first = chunks.rows(chunks.tokens(index)).start
            size = chunks.group.rows_per_block
            yield ChunkCopy(
                key,
                load.group_id,
                extents_of(key),
                chunks.chunk_bytes,
                tuple(device_rows(tables[load.group_id], rows, size)),
                rows.start - first,
            )


def rows_to_store(grid: ChunkGrid, ref: ChunkRef, table: Sequence[int]) -> tuple[int, ...] | None:
    """Where an attention chunk lies on the device; None: some of it is gone."""
    chunks = grid.geometry.groups[ref.group_id]
    rows = chunks.rows(chunks.tokens(ref.chunk))
    size = chunks.group.rows_per_block
    blocks = table[rows.start // size : (rows.stop - 1) // size + 1]
    if NULL_BLOCK in blocks or len(blocks) * size < len(rows):
        return None
    return tuple(blocks if size == 1 else device_rows(table, rows, size))


def blocks_of(rows: Sequence[int], rows_per_block: int) -> list[int]:
    """The blocks that rows lie in, each once."""
    if rows_per_block == 1:
        return list(dict.fromkeys(rows))
    return list(dict.fromkeys(row // rows_per_block for row in rows))


def _rows_to_load(
    chunks: GroupChunks, index: int, needed: TokenSpan, table: Sequence[int]
) -> RowSpan:
    """The rows of a chunk to fill; a window's first ones may have no block any more."""
    span = chunks.tokens(index)
    if chunks.group.kind is GroupKind.RECURRENT:
        return chunks.rows(span)
    rows = chunks.rows(span.intersection(needed))
    size = chunks.group.rows_per_block
    start = rows.start
    while start < rows.stop and table[start // size] == NULL_BLOCK:
        start += 1
    return type(rows)(start, rows.stop)
