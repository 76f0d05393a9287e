"""How groups are cut into chunks, and which keys a request's chunks have.

`GroupChunks` and `ChunkGeometry` are fixed while an engine's weights are; a `ChunkGrid` lays them
over one request's hashes. Chunk i of a group always covers the same tokens, whatever the other
groups do: grids of different groups need not line up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, key_suffix
from kvstrata.core.layout import GroupKind, KVGroup, KVLayout
from kvstrata.core.spans import RowSpan, TokenSpan, whole_units
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.core.lookups import GroupLookups, LookupCodes


@dataclass(frozen=True)
class GroupChunks:
    """The chunks of one group.

    An attention chunk is a run of whole blocks, or an even part of one block. A recurrent chunk
    is the state at the chunk's end.

    Raises:
        LayoutError: the chunk size does not fit the group's blocks.
    """

    group_id: GroupId
    group: KVGroup
    chunk_tokens: int
    hash_block_tokens: int
    generation: bytes = b""
    """Part of every key; another one after each change of the weights in a running engine, and for
    the weights of each adapter."""

    def __post_init__(self) -> None:
        group, size = self.group, self.chunk_tokens
        if size < self.hash_block_tokens or size % self.hash_block_tokens:
            raise LayoutError(
                f"{group.kind} group {self.group_id}: chunk of {size} tokens is not a multiple of "
                f"the hash block of {self.hash_block_tokens}"
            )
        if group.kind is GroupKind.RECURRENT:
            if size != group.boundary_tokens:
                raise LayoutError(
                    f"recurrent group {self.group_id}: chunk of {size} tokens, but states are "
                    f"{group.boundary_tokens} apart"
                )
            return
        is_part = group.block_tokens % size == 0 and size % group.cut_tokens == 0
        if size % group.block_tokens and not is_part:
            raise LayoutError(
                f"{group.kind} group {self.group_id}: chunk of {size} tokens neither holds whole "
                f"blocks of {group.block_tokens} nor an even part of one, cut at multiples of "
                f"{group.cut_tokens}"
            )

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on one rank."""
        if self.group.kind is GroupKind.RECURRENT:
            return self.group.block_bytes
        return self.group.block_bytes * self.chunk_tokens // self.group.block_tokens

    @cached_property
    def hashes_per_chunk(self) -> int:
        """Hash blocks in one chunk."""
        return self.chunk_tokens // self.hash_block_tokens

    @cached_property
    def margin_tokens(self) -> int:
        """How far past a hit the group's chunks must match.

        A draft head's entry for a token is made with the token after it, so the last one before a
        hit is vouched for only by a match that reaches further.
        """
        is_attention = self.group.kind is not GroupKind.RECURRENT
        return self.hash_block_tokens if self.group.is_draft and is_attention else 0

    @cached_property
    def is_ever_needed(self) -> bool:
        """Whether a hit can need a chunk: a window of one token is the token itself."""
        return self.group.window_tokens != 1 or self.margin_tokens > 0

    @cached_property
    def suffix(self) -> bytes:
        """What turns a prefix hash into a key of this group."""
        return self.generation + key_suffix(self.group_id)

    def num_chunks(self, num_tokens: int) -> int:
        """Complete chunks within the first `num_tokens` tokens."""
        return whole_units(num_tokens, self.chunk_tokens)

    def tokens(self, index: int) -> TokenSpan:
        """The tokens that chunk `index` covers; a recurrent state is taken at their end."""
        return TokenSpan(index * self.chunk_tokens, (index + 1) * self.chunk_tokens)

    def chunk_ending_at(self, num_tokens: int) -> int:
        """The last chunk that is complete within the first `num_tokens` tokens."""
        return whole_units(num_tokens, self.chunk_tokens) - 1

    def rows(self, tokens: TokenSpan) -> RowSpan:
        """The kernel blocks to copy for these tokens; for a state, the block it rests in."""
        if self.group.kind is GroupKind.RECURRENT:
            row = whole_units(tokens.stop - 1, self.group.block_tokens)
            return RowSpan(row, row + 1)
        return tokens.rows(self.group.cut_tokens)


@dataclass(frozen=True)
class ChunkGeometry:
    """The chunks of every group of a layout."""

    layout: KVLayout
    groups: tuple[GroupChunks, ...]

    @cached_property
    def recurrent(self) -> tuple[GroupChunks, ...]:
        """The groups whose chunks are states."""
        return tuple(c for c in self.groups if c.group.kind is GroupKind.RECURRENT)

    @cached_property
    def attention_sizes(self) -> tuple[int, ...]:
        """The sizes of chunks that are not states, each once."""
        sizes = {c.chunk_tokens for c in self.groups if c.group.kind is not GroupKind.RECURRENT}
        return tuple(sorted(sizes))

    @cached_property
    def fingerprint(self) -> str:
        """A stable name for what a key under this geometry means, the layout included."""
        sizes = ",".join(str(chunks.chunk_tokens) for chunks in self.groups)
        text = f"kvstrata/chunks/1:{self.layout.fingerprint}:{sizes}"
        return hashlib.sha256(text.encode()).hexdigest()

    def renewed(self, generation: bytes) -> ChunkGeometry:
        """The same chunks under other keys."""
        groups = tuple(replace(chunks, generation=generation) for chunks in self.groups)
        return replace(self, groups=groups)

    def adapted(self, weights: bytes) -> ChunkGeometry:
        """The same chunks under keys of their own, for requests with an adapter."""
        groups = (replace(c, generation=c.generation + weights) for c in self.groups)
        return replace(self, groups=tuple(groups))


class ChunkGrid:
    """The chunk keys of one request, made as its hashes arrive and never twice.

    Ownership: belongs to one request on the scheduler thread.

    Args:
        geometry: the engine's chunks.
        hashes: the request's live block hashes; read in place, may only grow.
    """

    def __init__(self, geometry: ChunkGeometry, hashes: Sequence[BlockHash]) -> None:
        self.geometry = geometry
        self._hashes = hashes
        self._keys: list[list[ChunkKey]] = [[] for _ in geometry.groups]

    @property
    def hashed_tokens(self) -> int:
        """Tokens covered by complete hash blocks."""
        return len(self._hashes) * self.geometry.layout.hash_block_tokens

    def num_chunks(self, group_id: GroupId) -> int:
        """Chunks of a group that have a key by now."""
        return whole_units(len(self._hashes), self.geometry.groups[group_id].hashes_per_chunk)

    def key(self, group_id: GroupId, index: int) -> ChunkKey:
        """The key of one chunk."""
        chunks = self.geometry.groups[group_id]
        return ChunkKey(self._hashes[(index + 1) * chunks.hashes_per_chunk - 1] + chunks.suffix)

    def keys(self, group_id: GroupId) -> Sequence[ChunkKey]:
        """The keys of a group's chunks so far, in chunk order. The list is live: don't keep it."""
        keys = self._keys[group_id]
        if len(keys) < self.num_chunks(group_id):
            self._grow(keys, self.geometry.groups[group_id])
        return keys

    def all_keys(self) -> Iterator[ChunkKey]:
        """The keys of all chunks so far, group after group."""
        for chunks in self.geometry.groups:
            yield from self.keys(chunks.group_id)

    def hash_before(self, num_tokens: int) -> BlockHash:
        """The prefix hash of the first `num_tokens` tokens, a multiple of the hash block."""
        blocks = whole_units(num_tokens, self.geometry.layout.hash_block_tokens)
        return self._hashes[blocks - 1] if blocks else BlockHash(b"")

    def lookup(self, lookup: Callable[[Sequence[ChunkKey]], LookupCodes]) -> GroupLookups:
        """Ask `lookup` once per group for all its keys."""
        return tuple(lookup(self.keys(chunks.group_id)) for chunks in self.geometry.groups)

    def _grow(self, keys: list[ChunkKey], chunks: GroupChunks) -> None:
        step, suffix = chunks.hashes_per_chunk, chunks.suffix
        first = (len(keys) + 1) * step - 1
        ends = self._hashes[first::step]
        keys.extend([ChunkKey(block_hash + suffix) for block_hash in ends])
