from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.engine.cache.group_tables import make_table
from kvstrata.testing.builders import full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from kvstrata.core.layout import KVGroup
    from kvstrata.engine.cache.group_tables import GroupTable


def a_table(group: KVGroup, *steps: int) -> GroupTable:
    """A table after steps that end at these tokens; its blocks are numbered from 1."""
    table, fresh = make_table(group), itertools.count(1)
    for stop in steps:
        table.grow(stop, fresh)
    return table


@pytest.mark.parametrize("group", [full_group(4), window_group(2, 4), window_group(99, 4)])
@pytest.mark.parametrize(
    ("stop", "expected"), [(1, [1]), (4, [1]), (5, [1, 2]), (8, [1, 2]), (9, [1, 2, 3])]
)
def test_attention_has_a_block_for_every_new_token(
    group: KVGroup, stop: int, expected: list[int]
) -> None:
    assert make_table(group).num_missing(stop) == len(expected)
    table = a_table(group, stop)
    assert table.blocks == expected
    assert table.num_missing(stop) == 0
    assert table.covered_tokens == 4 * len(expected)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((1,), [1]),
        ((4,), [1]),
        ((5,), [NULL_BLOCK, 1]),
        ((12,), [NULL_BLOCK, NULL_BLOCK, 1]),
        ((3, 4), [1]),
        ((4, 5), [1, 2]),
        ((2, 12), [1, NULL_BLOCK, 2]),
        ((4, 8, 9, 10), [1, 2, 3]),
    ],
)
def test_a_state_rests_where_its_last_token_falls(
    steps: tuple[int, ...], expected: list[int]
) -> None:
    assert a_table(recurrent_group(4), *steps).blocks == expected


@pytest.mark.parametrize(("stop", "missing"), [(8, 0), (9, 1), (12, 1), (40, 1)])
def test_a_step_makes_at_most_one_state(stop: int, missing: int) -> None:
    assert a_table(recurrent_group(4), 8).num_missing(stop) == missing


def test_full_attention_gives_nothing_up() -> None:
    table = a_table(full_group(4), 20)
    assert table.drop_unseen(20) == []
    assert table.blocks == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("window", "computed", "dropped"),
    [
        (1, 7, [1]),
        (1, 8, [1, 2]),
        (2, 8, [1]),
        (4, 7, [1]),
        (4, 6, []),
        (5, 7, []),
        (5, 8, [1]),
        (100, 12, []),
    ],
)
def test_a_window_gives_up_what_the_next_token_does_not_see(
    window: int, computed: int, dropped: list[int]
) -> None:
    table = a_table(window_group(window, 4), 12)
    assert table.drop_unseen(computed) == dropped
    kept = [block for block in [1, 2, 3] if block not in dropped]
    assert table.blocks == [NULL_BLOCK] * len(dropped) + kept


def test_a_window_keeps_a_block_that_is_not_full_though_nobody_sees_it() -> None:
    table = a_table(window_group(1, 4), 6)
    assert table.drop_unseen(6) == [1]
    assert table.blocks == [NULL_BLOCK, 2]


def test_a_block_is_given_up_once() -> None:
    table = a_table(window_group(1, 4), 12)
    assert table.drop_unseen(8) == [1, 2]
    assert table.drop_unseen(8) == []
    assert table.drop_unseen(4) == []
    assert table.drop_unseen(12) == [3]


@pytest.mark.parametrize(
    ("steps", "computed", "dropped"),
    [((4, 8), 8, [1]), ((4, 5), 5, [1]), ((4, 5), 4, []), ((4, 20, 21), 20, [1]), ((4,), 0, [])],
)
def test_states_before_the_last_are_given_up(
    steps: tuple[int, ...], computed: int, dropped: list[int]
) -> None:
    assert a_table(recurrent_group(4), *steps).drop_unseen(computed) == dropped


@pytest.mark.parametrize(
    ("group", "loaded", "expected"),
    [
        (full_group(4), 12, []),
        (window_group(1, 4), 12, [NULL_BLOCK] * 3),
        (window_group(1, 4), 10, [NULL_BLOCK] * 2),
        (window_group(2, 4), 12, [NULL_BLOCK] * 2),
        (window_group(6, 4), 12, [NULL_BLOCK]),
        (window_group(99, 4), 12, []),
        (recurrent_group(4), 12, [NULL_BLOCK] * 2),
        (recurrent_group(4), 4, []),
    ],
)
def test_a_load_skips_what_nothing_behind_it_sees(
    group: KVGroup, loaded: int, expected: list[int]
) -> None:
    table = make_table(group)
    table.skip_unseen(loaded)
    assert table.blocks == expected
    table.grow(loaded, itertools.count(1))
    assert len(table.blocks) == 3 - (loaded == 4) * 2


def test_a_load_behind_a_hit_keeps_the_blocks_of_the_hit() -> None:
    table = make_table(window_group(2, 4), [NULL_BLOCK, 7])
    table.skip_unseen(16)
    table.grow(16, itertools.count(1))
    assert table.blocks == [NULL_BLOCK, 7, NULL_BLOCK, 1]
    assert table.drop_unseen(16) == [7]


@pytest.mark.parametrize("group", [full_group(4), window_group(2, 4)])
@pytest.mark.parametrize(
    ("before", "computed", "expected"),
    [(0, 3, []), (0, 4, [0]), (3, 4, [0]), (4, 7, []), (4, 12, [1, 2]), (5, 8, [1])],
)
def test_a_block_is_final_when_its_last_token_is_computed(
    group: KVGroup, before: int, computed: int, expected: list[int]
) -> None:
    assert list(a_table(group, 12).completed(before, computed)) == expected


@pytest.mark.parametrize(
    ("before", "computed", "expected"),
    [(0, 3, []), (0, 4, [0]), (3, 4, [0]), (4, 7, []), (4, 12, [2]), (4, 11, []), (8, 8, [])],
)
def test_a_state_is_final_when_a_step_ends_where_its_block_ends(
    before: int, computed: int, expected: list[int]
) -> None:
    assert list(a_table(recurrent_group(4), computed).completed(before, computed)) == expected
