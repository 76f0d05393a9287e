"""Hypothesis strategies: layouts of any mixture, with and without common divisors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from kvstrata.core.layout import GroupKind, KVGroup, KVLayout
from kvstrata.core.lookups import ChunkLookup, GroupLookups, LookupCodes
from kvstrata.core.spans import floor_to
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.load_plan import LoadBounds
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from kvstrata.core.chunk_grid import ChunkGeometry

LARGEST_BLOCK = 2112
_MODEL_BLOCKS = (16, 32, 48, 64, 128, 256, 528, 784, 1056, 2112)
_MOST_TOKENS = 12_000


@dataclass(frozen=True)
class LoadCase:
    """One decision about one request."""

    geometry: ChunkGeometry
    lookups: GroupLookups
    bounds: LoadBounds


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def block_size_pools(draw: st.DrawFn) -> list[int]:
    """A few block sizes that one model's groups take theirs from.

    Small odd numbers find mistakes in the arithmetic, sizes that models have find those in the
    mixture, and numbers up to 2,112 without a common divisor find everything else.
    """
    unit = draw(st.sampled_from([1, 1, 2, 16, 48]))
    largest = draw(st.sampled_from([12, 12, 64, LARGEST_BLOCK]))
    sizes = st.integers(1, max(1, largest // unit)).map(lambda n: n * unit)
    return draw(
        st.lists(sizes, min_size=1, max_size=3)
        | st.lists(st.sampled_from(_MODEL_BLOCKS), min_size=1, max_size=3)
    )


@st.composite
def kv_groups(draw: st.DrawFn, sizes: list[int], state_block: int) -> KVGroup:
    """A group of any kind with blocks of one of these sizes; states share one size mostly."""
    block = draw(st.sampled_from(sizes))
    kind = draw(st.sampled_from(GroupKind))
    if kind is GroupKind.RECURRENT:
        return recurrent_group(draw(st.sampled_from([state_block] * 4 + [block])))
    kernel = draw(st.none() | st.sampled_from(divisors(block)))
    draft = draw(st.sampled_from([False, False, False, True]))
    if kind is GroupKind.FULL:
        return full_group(block, kernel=kernel, draft=draft)
    window = draw(st.integers(1, 3 * block) | st.integers(1, 2 * LARGEST_BLOCK) | st.just(block))
    return window_group(window, block, kernel=kernel, draft=draft)


@st.composite
def kv_layouts(draw: st.DrawFn, max_groups: int = 7) -> KVLayout:
    """One to seven groups of any kinds."""
    sizes = draw(block_size_pools())
    state_block = draw(st.sampled_from(sizes))
    count = draw(st.integers(1, max_groups))
    groups = [draw(kv_groups(sizes, state_block)) for _ in range(count)]
    largest = KVLayout.largest_hash_block(tuple(groups))
    hash_block = draw(st.just(largest) | st.sampled_from(divisors(largest)))
    factor = draw(st.none() | st.none() | st.integers(1, 4))
    layout = a_layout(*groups, hash_block=hash_block, alignment=factor and factor * hash_block)
    return draw(with_finer_states(layout))


@st.composite
def with_finer_states(draw: st.DrawFn, layout: KVLayout) -> KVLayout:
    """Sometimes let states exist inside blocks, at one distance for all groups that allow it."""
    if draw(st.booleans()):
        return layout
    unit = layout.hash_block_tokens
    step = unit * draw(st.integers(1, 4))
    groups = tuple(
        replace(group, state_tokens=step)
        if group.kind is GroupKind.RECURRENT and group.block_tokens % step == 0
        else group
        for group in layout.groups
    )
    return replace(layout, groups=groups)


@st.composite
def chunk_geometries(draw: st.DrawFn, max_groups: int = 7) -> ChunkGeometry:
    """A layout cut into chunks, automatically or by a setting."""
    layout = draw(kv_layouts(max_groups))
    size = draw(st.none() | st.integers(layout.hash_block_tokens, LARGEST_BLOCK + 600))
    return cut_into_chunks(layout, size)


@st.composite
def lookup_codes(draw: st.DrawFn, num_chunks: int) -> LookupCodes:
    """Mostly ready, with holes; sometimes mostly absent, with islands."""
    background = draw(st.sampled_from([ChunkLookup.READY] * 15 + [ChunkLookup.ABSENT]))
    row = bytearray([background]) * num_chunks
    if num_chunks:
        # Small numbers count from the end: that is where hits end.
        places = st.integers(1, min(6, num_chunks)) | st.integers(1, num_chunks)
        spots = st.tuples(places, st.sampled_from(ChunkLookup))
        for place, lookup in draw(st.lists(spots, max_size=draw(st.sampled_from([0, 0, 1, 6])))):
            row[num_chunks - place] = lookup
    return LookupCodes(bytes(row))


@st.composite
def request_lengths(draw: st.DrawFn, geometry: ChunkGeometry) -> int:
    """Often a little beyond a length at which a hit can end."""
    largest = max(chunks.chunk_tokens for chunks in geometry.groups)
    stride = geometry.layout.hit_stride_tokens
    top = max(1, _MOST_TOKENS // stride)
    hit = stride * draw(st.integers(1, min(top, 4 + 40 * largest // stride)))
    extra = draw(st.integers(0, 3) | st.integers(0, 2 * largest))
    return min(_MOST_TOKENS, max(0, hit + extra - draw(st.integers(0, 1))))


@st.composite
def load_cases(draw: st.DrawFn) -> LoadCase:
    """A request of any length, with any subset stored and any local hit."""
    geometry = draw(chunk_geometries())
    num_tokens = draw(request_lengths(geometry))
    hashed = floor_to(num_tokens, geometry.layout.hash_block_tokens)
    lookups = tuple(draw(lookup_codes(chunks.num_chunks(hashed))) for chunks in geometry.groups)
    local = draw(st.just(0) | st.just(0) | st.integers(0, max(0, num_tokens - 1)))
    most = draw(st.none() | st.none() | st.integers(0, num_tokens + 1))
    return LoadCase(geometry, lookups, LoadBounds(num_tokens, local, most))
