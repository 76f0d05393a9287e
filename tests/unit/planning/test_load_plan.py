from __future__ import annotations

import pytest

from kvstrata.core.lookups import ChunkLookup
from kvstrata.core.spans import ChunkSpan, TokenSpan
from kvstrata.planning.load_plan import LoadBounds, choose_load, usable_lengths
from kvstrata.testing.builders import (
    a_geometry,
    a_layout,
    full_group,
    lookups_with,
    recurrent_group,
    window_group,
)

HYBRID = a_geometry(a_layout(full_group(16), window_group(64, 16), recurrent_group(48)), 48, 32, 48)


def test_a_complete_cache_serves_all_but_the_last_token() -> None:
    geometry = a_geometry(a_layout(full_group(16)), 32)

    plan = choose_load(geometry, lookups_with(geometry, 96), LoadBounds(96))

    assert plan.num_tokens == 80, "96 would leave nothing to compute"
    assert plan.loads[0].chunks == ChunkSpan(0, 3)
    assert plan.loads[0].tokens == TokenSpan(0, 80)
    assert not plan.obstacles


def test_each_kind_loads_what_it_needs() -> None:
    plan = choose_load(HYBRID, lookups_with(HYBRID, 300), LoadBounds(300))

    full, window, recurrent = plan.loads
    assert plan.num_tokens == 288
    assert full.tokens == TokenSpan(0, 288)
    assert window.tokens == TokenSpan(225, 288)
    assert window.chunks == ChunkSpan(7, 9)
    assert recurrent.chunks == ChunkSpan(5, 6)


def test_local_tokens_are_not_loaded_again() -> None:
    bounds = LoadBounds(300, local_tokens=240)

    plan = choose_load(HYBRID, lookups_with(HYBRID, 300), bounds)

    assert plan.external_tokens == 48
    assert [load.tokens.start for load in plan.loads] == [240, 240, 240]


def test_nothing_beyond_the_local_hit_means_nothing_to_load() -> None:
    lookups = lookups_with(HYBRID, 300, missing=[(2, 5)])

    plan = choose_load(HYBRID, lookups, LoadBounds(300, local_tokens=240))

    assert (plan.num_tokens, plan.external_tokens, plan.loads) == (240, 0, ())


def test_a_missing_window_falls_back_past_lengths_that_lack_a_state() -> None:
    lookups = lookups_with(HYBRID, 300, missing=[(1, 8), (2, 3)])

    plan = choose_load(HYBRID, lookups, LoadBounds(300))

    assert plan.num_tokens == 240
    assert [str(obstacle) for obstacle in plan.obstacles] == [
        "window group 1: chunk 8 [256, 288) is absent, needed for 288 tokens"
    ]
    assert list(usable_lengths(HYBRID, lookups, LoadBounds(300))) == [240, 144, 96, 48]


def test_the_reason_names_a_missing_state() -> None:
    lookups = lookups_with(HYBRID, 300, missing=[(2, 5)], lookup=ChunkLookup.FAILED)

    (obstacle,) = choose_load(HYBRID, lookups, LoadBounds(300)).obstacles

    assert str(obstacle) == "recurrent group 2: state at 288 is failed, needed for 288 tokens"


@pytest.mark.parametrize("lookup", [ChunkLookup.ARRIVING, ChunkLookup.UNKNOWN])
def test_what_is_under_way_is_worth_waiting_for(lookup: ChunkLookup) -> None:
    lookups = lookups_with(HYBRID, 300, missing=[(0, 2)], lookup=lookup)

    plan = choose_load(HYBRID, lookups, LoadBounds(300))

    assert (plan.num_tokens, plan.awaited_tokens) == (96, 288)
    assert plan.obstacles[-1].lookup is lookup


def test_what_failed_is_not_awaited() -> None:
    lookups = lookups_with(HYBRID, 300, missing=[(0, 2)], lookup=ChunkLookup.FAILED)

    assert choose_load(HYBRID, lookups, LoadBounds(300)).awaited_tokens == 96


def test_a_draft_group_stays_one_unit_below_its_match() -> None:
    geometry = a_geometry(a_layout(full_group(16), full_group(16, draft=True)), 16, 16)

    assert choose_load(geometry, lookups_with(geometry, 160), LoadBounds(170)).num_tokens == 144
    missing = lookups_with(geometry, 160, missing=[(1, 5)])
    assert choose_load(geometry, missing, LoadBounds(170)).num_tokens == 64


def test_a_chunk_is_used_in_part_when_a_hit_ends_inside_it() -> None:
    geometry = a_geometry(a_layout(full_group(16), recurrent_group(48)), 64, 48)

    plan = choose_load(geometry, lookups_with(geometry, 128), LoadBounds(128))

    assert plan.num_tokens == 96
    assert plan.loads[0].chunks == ChunkSpan(0, 2)
    assert plan.loads[0].tokens == TokenSpan(0, 96)


def test_hits_respect_the_engines_alignment_and_the_requests_limit() -> None:
    geometry = a_geometry(a_layout(full_group(16), alignment=64), 16)

    assert choose_load(geometry, lookups_with(geometry, 160), LoadBounds(160)).num_tokens == 128
    limited = LoadBounds(160, max_tokens=100)
    assert choose_load(geometry, lookups_with(geometry, 160), limited).num_tokens == 64


@pytest.mark.parametrize(("num_tokens", "local"), [(16, 16), (16, 20), (4, -1), (0, 1)])
def test_a_local_hit_must_leave_a_token(num_tokens: int, local: int) -> None:
    with pytest.raises(ValueError, match="must leave one of num_tokens"):
        LoadBounds(num_tokens, local)


def test_an_empty_request_hits_nothing() -> None:
    assert choose_load(HYBRID, lookups_with(HYBRID, 0), LoadBounds(0)).num_tokens == 0


def test_one_window_of_one_token_needs_nothing() -> None:
    geometry = a_geometry(a_layout(full_group(16), window_group(1, 16)), 16, 16)

    plan = choose_load(geometry, lookups_with(geometry, 64, missing=[(1, 2)]), LoadBounds(70))

    assert plan.num_tokens == 64
    assert [load.group_id for load in plan.loads] == [0]
