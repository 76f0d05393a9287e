"""What one chunk announces, kept apart from its request.

An attention chunk announces every hash block in it. A recurrent chunk announces one: the hash block
that ends where the state was taken. A state serves no other length, so the hashes before it would
promise hits that cannot be had.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.layout import GroupKind, Sharding
from kvstrata.core.spans import TokenSpan
from kvstrata.telemetry.kv_events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.chunk_grid import ChunkGrid, GroupChunks
    from kvstrata.core.ids import GroupId
    from kvstrata.telemetry.kv_events import ExternalHash

_UNSIGNED_32: Final = "I"

_SPEC_KINDS: Final = {
    (GroupKind.FULL, Sharding.SHARDED): "full_attention",
    (GroupKind.FULL, Sharding.REPLICATED): "mla_attention",
    (GroupKind.WINDOW, Sharding.SHARDED): "sliding_window",
    (GroupKind.WINDOW, Sharding.REPLICATED): "sliding_window_mla",
    (GroupKind.RECURRENT, Sharding.SHARDED): "mamba",
    (GroupKind.RECURRENT, Sharding.REPLICATED): "mamba",
}
"""vLLM's names; it calls every recurrent state mamba."""


class Place(NamedTuple):
    """A tier, as events name it."""

    medium: str
    locality: str | None
    ownership: str


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    """Everything about a chunk but where it is."""

    chunks: GroupChunks
    hashes: tuple[ExternalHash, ...]
    parent: ExternalHash | None
    packed_tokens: bytes
    """32 bits each: a tuple of numbers takes ten times the room, and there may be millions."""
    lora: str | None

    def stored(self, place: Place) -> BlockStored:
        """The event that announces the chunk in a tier."""
        group = self.chunks.group
        return BlockStored(
            block_hashes=self.hashes,
            parent_block_hash=self.parent,
            token_ids=tuple(memoryview(self.packed_tokens).cast(_UNSIGNED_32)),
            block_size=self.chunks.hash_block_tokens,
            lora_id=None,
            medium=place.medium,
            lora_name=self.lora,
            group_idx=self.chunks.group_id,
            kv_cache_spec_kind=_SPEC_KINDS[group.kind, group.sharding],
            kv_cache_spec_sliding_window=group.window_tokens,
            locality=place.locality,
            ownership=place.ownership,
        )

    def removed(self, place: Place) -> BlockRemoved:
        """The event that takes the announcement back."""
        return BlockRemoved(
            block_hashes=self.hashes,
            medium=place.medium,
            group_idx=self.chunks.group_id,
            locality=place.locality,
            ownership=place.ownership,
        )


@dataclass(frozen=True, slots=True)
class Describer:
    """Makes descriptions of a request's chunks.

    Args:
        external_hash: how a hash is shown on the wire.
    """

    external_hash: Callable[[bytes], ExternalHash]

    def describe(
        self,
        grid: ChunkGrid,
        group_id: GroupId,
        index: int,
        *,
        tokens: Sequence[int],
        lora: str | None,
    ) -> ChunkDescription:
        """Describe one chunk.

        Raises:
            ValueError: the tokens end before the chunk does, or do not fit 32 bits.
        """
        chunks = grid.geometry.groups[group_id]
        span = announced_tokens(chunks, index)
        step = chunks.hash_block_tokens
        ends = range(span.start + step, span.stop + 1, step)
        return ChunkDescription(
            chunks=chunks,
            hashes=tuple(self.external_hash(grid.hash_before(end)) for end in ends),
            parent=self.external_hash(grid.hash_before(span.start)) if span.start else None,
            packed_tokens=_pack(tokens[span.start : span.stop], span),
            lora=lora,
        )


def announced_tokens(chunks: GroupChunks, index: int) -> TokenSpan:
    """The tokens that a chunk's events are about."""
    span = chunks.tokens(index)
    if chunks.group.kind is not GroupKind.RECURRENT:
        return span
    return TokenSpan(span.stop - chunks.hash_block_tokens, span.stop)


def _pack(tokens: Sequence[int], span: TokenSpan) -> bytes:
    if len(tokens) < len(span):
        raise ValueError(f"only {len(tokens)} of the tokens in {span} are there")
    try:
        return array(_UNSIGNED_32, tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
