"""Local hits against an oracle that asks token by token, over layouts of any mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import ChunkKey, GroupId, chunk_key
from kvstrata.core.layout import GroupKind
from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.engine.cache.prefix_cache import PrefixSearch
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import BlockHash
    from kvstrata.core.layout import KVGroup, KVLayout

SIZES = ([16], [16, 48], [16, 48, 80], [2, 3], [4, 6, 10], [1, 2, 4], [32, 48])


@st.composite
def groups(draw: st.DrawFn, sizes: list[int]) -> KVGroup:
    """A group of any kind, with a window of any size."""
    kind, size = draw(st.sampled_from(GroupKind)), draw(st.sampled_from(sizes))
    if kind is GroupKind.FULL:
        return full_group(size)
    if kind is GroupKind.RECURRENT:
        return recurrent_group(size)
    return window_group(draw(st.integers(1, 3 * size) | st.integers(1, 1000)), size)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """One to five groups; hashes at the largest size that divides all blocks."""
    sizes = draw(st.sampled_from(SIZES))
    return a_layout(*draw(st.lists(groups(sizes), min_size=1, max_size=5)))


Known = dict[tuple[int, int], int]
"""The block at a position of a group's table, where it is known."""


@st.composite
def known_blocks(draw: st.DrawFn, layout: KVLayout, num_tokens: int) -> Known:
    """Most blocks of a prefix with holes, or few: only the last ones of each group."""
    places = [
        (group_id, position)
        for group_id, group in enumerate(layout.groups)
        for position in range(num_tokens // group.block_tokens)
    ]
    if not places:
        return {}
    missing = draw(st.sets(st.sampled_from(places), max_size=draw(st.sampled_from([0, 2, 12]))))
    return {place: 1 + n for n, place in enumerate(places) if place not in missing}


def needs(group: KVGroup, length: int) -> set[int]:
    """The positions that a group looks back on after so many tokens, token by token."""
    size = group.block_tokens
    match group.kind:
        case GroupKind.FULL:
            return {t // size for t in range(length)}
        case GroupKind.WINDOW:
            assert group.window_tokens is not None
            return {t // size for t in range(length) if t > length - group.window_tokens}
        case GroupKind.RECURRENT:
            return {length // size - 1}


def oracle_length(layout: KVLayout, known: Known, most_tokens: int) -> int:
    """The longest prefix that cuts no block and that every group has."""
    for length in range(most_tokens, 0, -1):
        if any(length % group.block_tokens for group in layout.groups):
            continue
        if all(
            (group_id, position) in known
            for group_id, group in enumerate(layout.groups)
            for position in needs(group, length)
        ):
            return length
    return 0


def names(layout: KVLayout, hashes: Sequence[BlockHash], known: Known) -> dict[ChunkKey, int]:
    """The same blocks by key: the hash where a block ends, and its group."""
    hashes_at = {(n + 1) * layout.hash_block_tokens: name for n, name in enumerate(hashes)}
    return {
        chunk_key(hashes_at[(p + 1) * layout.groups[g].block_tokens], GroupId(g)): block
        for (g, p), block in known.items()
    }


@given(st.data())
def test_a_hit_is_the_longest_prefix_that_every_group_still_has(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    num_tokens = data.draw(st.integers(0, 40 * layout.hash_block_tokens))
    most_tokens = data.draw(st.sampled_from([num_tokens, max(0, num_tokens - 1)]))
    known = data.draw(known_blocks(layout, num_tokens))
    hasher = PrefixHasher(layout.hash_block_tokens)
    hasher.extend(range(num_tokens))

    search = PrefixSearch(layout, names(layout, hasher.hashes, known).get)
    hit = search.longest(hasher.hashes, most_tokens)

    assert hit.num_tokens == oracle_length(layout, known, most_tokens)
    for group_id, (group, table) in enumerate(zip(layout.groups, hit.tables, strict=True)):
        needed = needs(group, hit.num_tokens) if hit.num_tokens else set()
        assert len(table) * group.block_tokens == hit.num_tokens
        for position, block in enumerate(table):
            expected = known[group_id, position] if position in needed else NULL_BLOCK
            assert block == expected
