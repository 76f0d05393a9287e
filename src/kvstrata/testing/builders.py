"""Small layouts, grids and look-ups with defaults, so that a test names only what it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid, GroupChunks
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.core.lookups import ChunkLookup, GroupLookups, LookupCodes

if TYPE_CHECKING:
    from collections.abc import Sequence


def full_group(
    block_tokens: int = 16,
    *,
    kernel: int | None = None,
    draft: bool = False,
    layers: Sequence[str] = ("full",),
    page_bytes: int | None = None,
) -> KVGroup:
    """A full-attention group."""
    return KVGroup(
        kind=GroupKind.FULL,
        block_tokens=block_tokens,
        kernel_block_tokens=kernel,
        layers=_layers(layers, page_bytes or 64 * block_tokens),
        is_draft=draft,
    )


def window_group(
    window: int,
    block_tokens: int = 16,
    *,
    kernel: int | None = None,
    draft: bool = False,
    layers: Sequence[str] = ("window",),
) -> KVGroup:
    """A sliding-window group."""
    return KVGroup(
        kind=GroupKind.WINDOW,
        block_tokens=block_tokens,
        kernel_block_tokens=kernel,
        window_tokens=window,
        layers=_layers(layers, 64 * block_tokens),
        is_draft=draft,
    )


def recurrent_group(
    block_tokens: int = 16,
    *,
    state_tokens: int | None = None,
    layers: Sequence[str] = ("recurrent",),
) -> KVGroup:
    """A group of recurrent states."""
    return KVGroup(
        kind=GroupKind.RECURRENT,
        block_tokens=block_tokens,
        state_tokens=state_tokens,
        layers=_layers(layers, 4096),
    )


def a_layout(
    *groups: KVGroup, hash_block: int | None = None, alignment: int | None = None
) -> KVLayout:
    """A layout of these groups; layers are renamed so that they are distinct."""
    distinct = tuple(
        KVGroup(
            kind=group.kind,
            block_tokens=group.block_tokens,
            layers=tuple(KVLayer(f"{layer.name}.{i}", layer.page_bytes) for layer in group.layers),
            kernel_block_tokens=group.kernel_block_tokens,
            window_tokens=group.window_tokens,
            state_tokens=group.state_tokens,
            sharding=group.sharding,
            is_draft=group.is_draft,
        )
        for i, group in enumerate(groups)
    )
    return KVLayout(
        groups=distinct,
        hash_block_tokens=hash_block or KVLayout.largest_hash_block(distinct),
        dtype="bfloat16",
        hit_alignment_tokens=alignment,
    )


def a_geometry(layout: KVLayout, *chunk_tokens: int) -> ChunkGeometry:
    """A geometry with exactly these chunk sizes."""
    return ChunkGeometry(
        layout,
        tuple(
            GroupChunks(GroupId(i), group, size, layout.hash_block_tokens)
            for i, (group, size) in enumerate(zip(layout.groups, chunk_tokens, strict=True))
        ),
    )


def a_grid(geometry: ChunkGeometry, num_tokens: int) -> ChunkGrid:
    """The grid of a request of `num_tokens` tokens."""
    hasher = PrefixHasher(geometry.layout.hash_block_tokens)
    hasher.extend(range(num_tokens))
    return ChunkGrid(geometry, hasher.hashes)


def lookups_with(
    geometry: ChunkGeometry,
    num_tokens: int,
    *,
    missing: Sequence[tuple[int, int]] = (),
    lookup: ChunkLookup = ChunkLookup.ABSENT,
) -> GroupLookups:
    """Everything READY but the (group, chunk) pairs in `missing`."""
    rows = [
        bytearray([ChunkLookup.READY]) * chunks.num_chunks(num_tokens) for chunks in geometry.groups
    ]
    for group_id, index in missing:
        rows[group_id][index] = lookup
    return tuple(LookupCodes(bytes(row)) for row in rows)


def _layers(names: Sequence[str], page_bytes: int) -> tuple[KVLayer, ...]:
    return tuple(KVLayer(name, page_bytes) for name in names)
