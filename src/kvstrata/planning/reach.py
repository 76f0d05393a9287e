"""Whether a configuration can ever produce a hit.

A model whose states are 25,872 tokens apart, served with a maximum of 8,192 tokens, stores chunks
for ever and never loads one. That is arithmetic, so it is done at start and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, ceil_to, floor_to
from kvstrata.errors import ConfigError
from kvstrata.planning.chunk_sizes import cut_into_chunks

if TYPE_CHECKING:
    from kvstrata.core.chunk_grid import ChunkGeometry, GroupChunks
    from kvstrata.core.layout import KVLayout

_MOST_TRIES: Final = 2048


@dataclass(frozen=True, slots=True)
class FirstHit:
    """The shortest hit a geometry can ever serve."""

    hit_tokens: int
    prompt_tokens: int
    """The shortest request that can have it: one token is computed, and each group's last chunk
    must be complete."""
    slowest: GroupChunks | None
    """The attention group whose chunk needs that many tokens; None: the hit length itself does."""


def first_hit(geometry: ChunkGeometry) -> FirstHit:
    """The shortest hit, and the shortest request that can have it."""
    hit = geometry.layout.hit_stride_tokens
    prompt, slowest = hit + 1, None
    for chunks in geometry.groups:
        complete = ceil_to(hit + chunks.margin_tokens, chunks.chunk_tokens)
        if chunks.is_ever_needed and complete > prompt:
            prompt, slowest = complete, chunks
    return FirstHit(hit, prompt, slowest)


def require_reach(geometry: ChunkGeometry, max_model_tokens: int) -> None:
    """Refuse a geometry that can serve no request of the model.

    Raises:
        ConfigError: names the lengths, and the setting that would help.
    """
    first = first_hit(geometry)
    if first.prompt_tokens <= max_model_tokens:
        return
    if first.hit_tokens >= max_model_tokens:
        raise _hits_too_far_apart(geometry.layout, first, max_model_tokens)
    raise _chunks_too_large(geometry.layout, first, max_model_tokens)


def _hits_too_far_apart(layout: KVLayout, first: FirstHit, max_model_tokens: int) -> ConfigError:
    states = sorted({g.boundary_tokens for g in layout.groups if g.kind is GroupKind.RECURRENT})
    if layout.alignment_tokens >= max_model_tokens:
        cause = f"the engine takes hits at multiples of {layout.alignment_tokens} alone"
        remedy = "a smaller hit alignment"
    else:
        cause = (
            f"recurrent states exist every {states} tokens, in all groups at once only every "
            f"{first.hit_tokens} tokens"
        )
        remedy = "smaller blocks for the recurrent groups"
    return ConfigError(
        "block_size",
        f"no request can ever hit: {cause}, and the longest request has {max_model_tokens} tokens",
        f"{remedy} in the engine's settings, or a maximum model length above {first.hit_tokens}",
    )


def _chunks_too_large(layout: KVLayout, first: FirstHit, max_model_tokens: int) -> ConfigError:
    chunks = first.slowest
    assert chunks is not None  # the hit itself fits, so a chunk does not
    size = _chunk_size_that_reaches(layout, max_model_tokens)
    remedy = (
        f"a hybrid_chunk_size such as {size}"
        if size is not None
        else f"smaller blocks than {chunks.group.block_tokens} tokens in the engine's settings"
    )
    return ConfigError(
        "hybrid_chunk_size",
        f"nothing can ever be stored for a hit: {chunks.group.kind} group {chunks.group_id} has "
        f"its chunks complete at {first.prompt_tokens} tokens at the earliest, and the longest "
        f"request has {max_model_tokens}",
        f"{remedy}, or a maximum model length of at least {first.prompt_tokens}",
    )


def _chunk_size_that_reaches(layout: KVLayout, max_model_tokens: int) -> int | None:
    """The largest setting, tried in at most a few thousand steps, that would serve a hit."""
    unit = layout.hash_block_tokens
    step = ceil_to(ceil_div(max_model_tokens, _MOST_TRIES), unit)
    sizes: list[int] = [*range(floor_to(max_model_tokens, unit), unit, -step), unit]
    for size in sizes:
        if first_hit(cut_into_chunks(layout, size)).prompt_tokens <= max_model_tokens:
            return size
    return None
