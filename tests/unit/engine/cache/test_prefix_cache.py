from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import ChunkKey, GroupId, chunk_key
from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.engine.cache.prefix_cache import PrefixSearch, needed_positions
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import BlockHash
    from kvstrata.core.layout import KVGroup, KVLayout


def hashes_of(num_tokens: int, hash_tokens: int = 4) -> Sequence[BlockHash]:
    hasher = PrefixHasher(hash_tokens)
    hasher.extend(range(num_tokens))
    return hasher.hashes


class Device:
    """Blocks of one prompt: position p of group g is block 100 * g + p + 1."""

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        self.layout = layout
        self.hashes = hashes_of(num_tokens, layout.hash_block_tokens)
        self.known: dict[ChunkKey, int] = {}
        for group_id, group in enumerate(layout.groups):
            for position in range(num_tokens // group.block_tokens):
                self.known[self.key(group_id, position)] = 100 * group_id + position + 1

    def key(self, group_id: int, position: int) -> ChunkKey:
        end = (position + 1) * self.layout.groups[group_id].block_tokens
        return chunk_key(self.hashes[end // self.layout.hash_block_tokens - 1], GroupId(group_id))

    def without(self, *places: tuple[int, int]) -> Device:
        for place in places:
            del self.known[self.key(*place)]
        return self

    def hit(self, most_tokens: int = 1000) -> tuple[int, tuple[list[int], ...]]:
        found = PrefixSearch(self.layout, self.known.get).longest(self.hashes, most_tokens)
        return found.num_tokens, found.tables


def test_an_empty_device_has_no_hit() -> None:
    device = Device(a_layout(full_group(4), recurrent_group(4)), 12)
    device.known.clear()
    assert device.hit() == (0, ([], []))


def test_full_attention_hits_up_to_its_first_gap() -> None:
    device = Device(a_layout(full_group(4)), 20).without((0, 2))
    assert device.hit() == (8, ([1, 2],))


def test_a_hit_is_no_longer_than_asked_for() -> None:
    device = Device(a_layout(full_group(4)), 20)
    assert device.hit(19) == (16, ([1, 2, 3, 4],))
    assert device.hit(3) == (0, ([],))


def test_a_hit_is_no_longer_than_the_hashes() -> None:
    assert Device(a_layout(full_group(4)), 10).hit() == (8, ([1, 2],))


def test_a_hit_cuts_no_block_of_any_group() -> None:
    device = Device(a_layout(full_group(16), full_group(48), full_group(80)), 700)
    assert device.layout.hash_block_tokens == 16
    assert device.hit()[0] == 480


def test_a_window_needs_only_what_the_next_token_sees() -> None:
    device = Device(a_layout(window_group(5, 4)), 16).without((0, 0), (0, 1), (0, 2))
    assert device.hit() == (16, ([NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 4],))


def test_a_window_that_lacks_one_of_its_blocks_is_no_hit() -> None:
    device = Device(a_layout(window_group(6, 4)), 16).without((0, 2))
    assert device.hit() == (8, ([1, 2],))


def test_a_window_of_one_token_needs_nothing() -> None:
    device = Device(a_layout(window_group(1, 4)), 16)
    device.known.clear()
    assert device.hit() == (16, ([NULL_BLOCK] * 4,))


def test_a_state_is_needed_at_exactly_the_end() -> None:
    device = Device(a_layout(full_group(4), recurrent_group(8)), 32).without((1, 3), (1, 1))
    assert device.hit() == (24, ([1, 2, 3, 4, 5, 6], [NULL_BLOCK, NULL_BLOCK, 103]))


def test_a_hit_may_be_gone_at_one_length_and_there_at_a_longer_one() -> None:
    device = Device(a_layout(recurrent_group(4)), 12).without((0, 0), (0, 1))
    assert device.hit(12)[0] == 12
    assert device.hit(11)[0] == 0


def test_every_group_must_have_the_same_length() -> None:
    layout = a_layout(full_group(4), window_group(4, 4), recurrent_group(4))
    device = Device(layout, 16).without((2, 3), (1, 2))
    assert device.hit()[0] == 8


def test_another_group_s_block_is_no_hit() -> None:
    device = Device(a_layout(full_group(4), full_group(4)), 8).without((1, 0))
    assert device.hit()[0] == 0


def test_the_key_of_a_block_is_the_hash_where_it_ends() -> None:
    search = PrefixSearch(a_layout(full_group(8), full_group(12)), lambda _: None)
    hashes = hashes_of(24)
    assert search.key(hashes, GroupId(0), 1) == chunk_key(hashes[3], GroupId(0))
    assert search.key(hashes, GroupId(1), 1) == chunk_key(hashes[5], GroupId(1))


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (full_group(4), range(3)),
        (recurrent_group(4), range(2, 3)),
        (window_group(1, 4), range(3, 3)),
        (window_group(2, 4), range(2, 3)),
        (window_group(5, 4), range(2, 3)),
        (window_group(6, 4), range(1, 3)),
        (window_group(12, 4), range(3)),
        (window_group(500, 4), range(3)),
    ],
)
def test_needed_positions_of_twelve_tokens(group: KVGroup, expected: range) -> None:
    assert needed_positions(group, 12) == expected
