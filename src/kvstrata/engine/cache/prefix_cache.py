"""The longest prefix that every group still has on the device.

Shared blocks are never written again, so a local hit ends where blocks end in every group. Lengths
are not downward closed: a window or a state may be there at one length and gone at a shorter one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import TokenSpan, floor_to
from kvstrata.engine.cache.block_pool import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.layout import KVGroup, KVLayout


@dataclass(frozen=True, slots=True)
class LocalHit:
    """A prefix that is on the device."""

    num_tokens: int
    tables: tuple[list[int], ...]
    """The blocks to share, by group; the null block where a group needs none."""


class PrefixSearch:
    """Looks for local hits of one layout.

    Args:
        layout: the groups.
        find: the block with a key, if there is one.
    """

    def __init__(self, layout: KVLayout, find: Callable[[ChunkKey], int | None]) -> None:
        self._groups = layout.groups
        self._hash_tokens = layout.hash_block_tokens
        self._find = find
        self.stride_tokens = math.lcm(*(group.block_tokens for group in layout.groups))

    def key(self, hashes: Sequence[BlockHash], group_id: GroupId, position: int) -> ChunkKey:
        """The key of the block at a position of a group's table."""
        end = (position + 1) * self._groups[group_id].block_tokens
        return chunk_key(hashes[end // self._hash_tokens - 1], group_id)

    def longest(self, hashes: Sequence[BlockHash], most_tokens: int) -> LocalHit:
        """The longest hit of at most so many tokens. Changes nothing."""
        most_tokens = min(most_tokens, len(hashes) * self._hash_tokens)
        for group_id, group in enumerate(self._groups):
            if group.kind is GroupKind.FULL:
                most_tokens = self._unbroken(hashes, GroupId(group_id), most_tokens)
        for length in range(floor_to(most_tokens, self.stride_tokens), 0, -self.stride_tokens):
            tables = self._tables(hashes, length)
            if tables is not None:
                return LocalHit(length, tables)
        return LocalHit(0, tuple([] for _ in self._groups))

    def _unbroken(self, hashes: Sequence[BlockHash], group_id: GroupId, most_tokens: int) -> int:
        """How far the blocks of a full group reach without a gap."""
        block_tokens = self._groups[group_id].block_tokens
        for position in range(most_tokens // block_tokens):
            if self._find(self.key(hashes, group_id, position)) is None:
                return position * block_tokens
        return most_tokens

    def _tables(self, hashes: Sequence[BlockHash], length: int) -> tuple[list[int], ...] | None:
        """Every group's blocks for this length; None: a group lacks one."""
        tables: list[list[int]] = []
        for group_id in reversed(range(len(self._groups))):  # states and windows decide first
            table = self._table(hashes, GroupId(group_id), length)
            if table is None:
                return None
            tables.append(table)
        return tuple(reversed(tables))

    def _table(
        self, hashes: Sequence[BlockHash], group_id: GroupId, length: int
    ) -> list[int] | None:
        group = self._groups[group_id]
        needed = needed_positions(group, length)
        table = [NULL_BLOCK] * needed.start
        for position in needed:
            block_id = self._find(self.key(hashes, group_id, position))
            if block_id is None:
                return None
            table.append(block_id)
        return table + [NULL_BLOCK] * (length // group.block_tokens - len(table))


def needed_positions(group: KVGroup, length: int) -> range:
    """The positions of a table that must have blocks for a hit of this length."""
    last = length // group.block_tokens
    match group.kind:
        case GroupKind.FULL:
            return range(last)
        case GroupKind.RECURRENT:
            return range(last - 1, last)
        case GroupKind.WINDOW:
            window = group.window_tokens or 1
            span = TokenSpan(max(0, length - window + 1), length).blocks(group.block_tokens)
            return range(span.start, span.stop)
