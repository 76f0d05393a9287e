"""How large chunks are: chosen from the groups, so that users need no arithmetic.

A large chunk makes few keys and long reads; a small one makes hits that reach further. The choice
is made per group, from its own bytes per token, and looks at the other groups for one thing only:
a chunk that ends where hits end is never loaded in part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvstrata.core.chunk_grid import ChunkGeometry, GroupChunks
from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayout
from kvstrata.core.spans import ceil_div
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

WANTED_CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Long enough that a disk or network read is bound by bandwidth, not by latency."""

FEWEST_TOKENS: Final = 128
"""An automatic chunk aims for no fewer tokens: more would be keys without further reach."""

MOST_TOKENS: Final = 512
"""An automatic chunk aims for no more tokens: the rest of a chunk is what a hit can miss."""

_ALIGNED_SHARE: Final = 4
"""A chunk that lines up with the hits may be this many times smaller than wanted."""


def cut_into_chunks(layout: KVLayout, hybrid_chunk_size: int | None = None) -> ChunkGeometry:
    """Choose every group's chunk size.

    Args:
        layout: the model's groups.
        hybrid_chunk_size: the most tokens an attention chunk should hold; None: chosen per group.
            A block or kernel block that is larger is not cut smaller for it, nor is a state.

    Raises:
        ConfigError: `hybrid_chunk_size` is smaller than the hash block.
    """
    if hybrid_chunk_size is not None and hybrid_chunk_size < layout.hash_block_tokens:
        raise ConfigError(
            "hybrid_chunk_size",
            f"{hybrid_chunk_size} tokens are fewer than the hash block of "
            f"{layout.hash_block_tokens}",
            f"at least {layout.hash_block_tokens}, or leave it out to have it chosen",
        )
    return ChunkGeometry(
        layout,
        tuple(
            GroupChunks(
                GroupId(index),
                group,
                _chunk_tokens(layout, group, hybrid_chunk_size),
                layout.hash_block_tokens,
            )
            for index, group in enumerate(layout.groups)
        ),
    )


def _chunk_tokens(layout: KVLayout, group: KVGroup, hybrid_chunk_size: int | None) -> int:
    if group.kind is GroupKind.RECURRENT:
        return group.boundary_tokens
    unit = math.lcm(group.cut_tokens, layout.hash_block_tokens)
    wanted = hybrid_chunk_size or _wanted_tokens(group)
    if group.window_tokens is not None:
        wanted = min(wanted, max(group.window_tokens, unit))
    sizes = [size for size in _possible_sizes(group, unit, wanted) if size <= wanted]
    if not sizes:
        return unit
    stride = layout.hit_stride_tokens
    aligned = [s for s in sizes if stride % s == 0 and s * _ALIGNED_SHARE >= wanted]
    return max(aligned or sizes)


def _wanted_tokens(group: KVGroup) -> int:
    tokens = ceil_div(WANTED_CHUNK_BYTES * group.block_tokens, group.block_bytes)
    return min(max(tokens, FEWEST_TOKENS), MOST_TOKENS)


def _possible_sizes(group: KVGroup, unit: int, most: int) -> Iterable[int]:
    """Even parts of a block, and runs of whole blocks up to `most` tokens."""
    block = group.block_tokens
    yield from (size for size in range(unit, block, unit) if block % size == 0)
    yield from range(block, most + 1, block)
