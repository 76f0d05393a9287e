from __future__ import annotations

import pytest

from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import GroupId
from kvstrata.core.lookups import ChunkLookup, to_codes
from kvstrata.planning.load_plan import LoadBounds, choose_load
from kvstrata.planning.request_ledger import (
    ChunkProgress,
    ChunkRef,
    RequestLedger,
    StateOffer,
)
from kvstrata.planning.store_plan import choose_stores
from kvstrata.testing.builders import (
    a_geometry,
    a_grid,
    a_layout,
    full_group,
    lookups_with,
    recurrent_group,
    window_group,
)

ABSENT, READY = ChunkLookup.ABSENT, ChunkLookup.READY
FULL, WINDOW, STATE = GroupId(0), GroupId(1), GroupId(2)
HYBRID = a_geometry(a_layout(full_group(16), window_group(64, 16), recurrent_group(96)), 32, 32, 96)


def ledger_of(geometry: ChunkGeometry, num_tokens: int) -> RequestLedger:
    return RequestLedger(a_grid(geometry, num_tokens))


def chosen(ledger: RequestLedger, limit: int | None = None) -> list[tuple[int, int]]:
    return [(ref.group_id, ref.chunk) for ref in choose_stores(ledger, limit).chunks]


def store(ledger: RequestLedger) -> list[tuple[int, int]]:
    plan = choose_stores(ledger)
    ledger.begin(plan.chunks)
    ledger.settle(plan.chunks)
    return [(ref.group_id, ref.chunk) for ref in plan.chunks]


def test_complete_chunks_are_chosen_once() -> None:
    ledger = ledger_of(a_geometry(a_layout(full_group(16)), 32), 200)
    ledger.advance(70)
    assert store(ledger) == [(0, 0), (0, 1)]
    ledger.advance(95)
    assert store(ledger) == []
    ledger.advance(128)
    assert store(ledger) == [(0, 2), (0, 3)]


def test_part_of_a_block_can_be_chosen() -> None:
    geometry = a_geometry(a_layout(full_group(96, kernel=16), hash_block=16), 32)
    ledger = ledger_of(geometry, 200)
    ledger.advance(70)

    assert store(ledger) == [(0, 0), (0, 1)]


def test_tokens_without_a_hash_are_not_stored() -> None:
    ledger = ledger_of(a_geometry(a_layout(full_group(16)), 32), 60)
    ledger.advance(64)

    assert chosen(ledger) == [(0, 0)]


def test_limit_keeps_later_chunks_out() -> None:
    ledger = ledger_of(a_geometry(a_layout(full_group(16)), 32), 200)
    ledger.advance(200)

    assert chosen(ledger, 100) == [(0, 0), (0, 1), (0, 2)]


def test_choosing_changes_nothing() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.advance(192)

    assert chosen(ledger) == chosen(ledger) != []


def test_states_are_stored_only_where_they_exist() -> None:
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(200)
    assert (STATE, 0) not in store(ledger)
    ledger.advance(288)
    ledger.offer_state(StateOffer(STATE, 288))
    assert (STATE, 2) in store(ledger)


def test_an_offer_is_void_after_the_next_step() -> None:
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(96)
    ledger.offer_state(StateOffer(STATE, 96))
    ledger.advance(97)

    assert (STATE, 0) not in chosen(ledger)


@pytest.mark.parametrize("boundary", [0, 80, 480])
def test_states_no_hit_can_use_are_left_out(boundary: int) -> None:
    """At zero, off the grid, and beyond what is hashed."""
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(400)
    ledger.offer_state(StateOffer(STATE, boundary))

    assert not [ref for ref in chosen(ledger) if ref[0] == STATE]


def test_a_state_that_another_recurrent_group_cannot_match_is_left_out() -> None:
    geometry = a_geometry(a_layout(recurrent_group(32), recurrent_group(48)), 32, 48)
    ledger = ledger_of(geometry, 200)
    ledger.advance(96)
    for group_id, boundary in ((0, 32), (0, 96), (1, 96), (1, 48)):
        ledger.offer_state(StateOffer(GroupId(group_id), boundary))

    assert sorted(chosen(ledger)) == [(0, 2), (1, 1)]


def test_windows_are_stored_only_before_a_kept_state() -> None:
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(192)
    ledger.offer_state(StateOffer(STATE, 192))

    assert [ref for ref in store(ledger) if ref[0] == WINDOW] == [(WINDOW, 4), (WINDOW, 5)]


def test_a_window_completed_before_its_state_is_caught_up() -> None:
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(180)
    assert not [ref for ref in store(ledger) if ref[0] == WINDOW]
    ledger.advance(192)
    ledger.offer_state(StateOffer(STATE, 192))
    assert [ref for ref in store(ledger) if ref[0] == WINDOW] == [(WINDOW, 4), (WINDOW, 5)]


def test_without_states_every_window_can_be_reached() -> None:
    geometry = a_geometry(a_layout(full_group(16), window_group(64, 16)), 32, 32)
    ledger = ledger_of(geometry, 200)
    ledger.advance(128)

    assert [ref for ref in store(ledger) if ref[0] == WINDOW] == [(WINDOW, i) for i in range(4)]


def test_a_coarse_alignment_makes_windows_unreachable() -> None:
    geometry = a_geometry(a_layout(full_group(16), window_group(17, 16), alignment=128), 16, 16)
    ledger = ledger_of(geometry, 300)
    ledger.advance(256)

    windows = [ref for ref in store(ledger) if ref[0] == WINDOW]
    assert windows == [(WINDOW, 7), (WINDOW, 15)]


def test_window_blocks_the_engine_took_back_are_not_chosen() -> None:
    geometry = a_geometry(a_layout(window_group(64, 16)), 32)
    ledger = ledger_of(geometry, 400)
    ledger.advance(200)
    ledger.advance(288)

    assert chosen(ledger) == [(0, i) for i in range(4, 9)], "136 is the first kept block's chunk"


def test_the_first_token_of_a_step_decides_which_window_blocks_are_kept() -> None:
    geometry = a_geometry(a_layout(window_group(42, 16)), 16)
    ledger = ledger_of(geometry, 400)
    ledger.advance(200)
    ledger.advance(208)

    assert chosen(ledger)[0] == (0, 9), "token 200 sees 159, which lies in block 9"


def test_a_hit_keeps_only_the_window_before_it() -> None:
    geometry = a_geometry(a_layout(window_group(64, 16)), 16)
    ledger = ledger_of(geometry, 300)
    ledger.resume(choose_load(geometry, lookups_with(geometry, 0), LoadBounds(300, 192)))

    assert chosen(ledger) == [(0, i) for i in range(8, 12)]


def test_stores_come_in_the_order_of_the_tokens() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.advance(192)
    ledger.offer_state(StateOffer(STATE, 192))

    ends = [
        (ref.chunk + 1) * (96 if ref.group_id == STATE else 32)
        for ref in choose_stores(ledger).chunks
    ]
    assert ends == sorted(ends)


def test_loaded_chunks_are_not_stored_again() -> None:
    ledger = ledger_of(HYBRID, 300)
    ledger.resume(choose_load(HYBRID, lookups_with(HYBRID, 288), LoadBounds(300)))
    assert ledger.computed_tokens == 288
    assert chosen(ledger) == []
    ledger.advance(300)
    assert chosen(ledger) == []


def test_a_local_hit_is_stored_like_computed_tokens() -> None:
    ledger = ledger_of(HYBRID, 300)
    lookups = lookups_with(HYBRID, 0)
    ledger.resume(choose_load(HYBRID, lookups, LoadBounds(300, local_tokens=192)))

    assert [ref for ref in chosen(ledger) if ref[0] == FULL] == [(FULL, i) for i in range(6)]


def test_preemption_forgets_the_device_but_not_what_is_stored() -> None:
    ledger = ledger_of(HYBRID, 400)
    ledger.advance(128)
    stored = store(ledger)
    ledger.preempt()
    assert ledger.computed_tokens == 0
    assert chosen(ledger) == []
    ledger.advance(192)
    again = store(ledger)
    assert not set(stored) & set(again)
    assert (FULL, 5) in again


def test_a_failed_store_is_tried_once_more() -> None:
    ledger = ledger_of(a_geometry(a_layout(full_group(16)), 32), 200)
    ledger.advance(64)
    first = choose_stores(ledger).chunks
    ledger.begin(first)
    ledger.settle(first[1:], failed=first[:1])

    retry = choose_stores(ledger).chunks
    assert retry == first[:1]
    ledger.begin(retry)
    ledger.settle((), failed=retry)
    assert ledger.progress(retry[0]) is ChunkProgress.GIVEN_UP
    ledger.advance(200)
    assert first[0] not in choose_stores(ledger).chunks


def test_what_was_not_begun_comes_again_with_the_next_chunk() -> None:
    ledger = ledger_of(a_geometry(a_layout(full_group(16)), 32), 200)
    ledger.advance(64)
    ledger.begin(choose_stores(ledger).chunks[:1])
    assert not ledger.has_news
    ledger.advance(96)
    assert chosen(ledger) == [(0, 1), (0, 2)]


def test_an_ended_request_stores_nothing_new_but_settles() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.advance(64)
    flight = choose_stores(ledger).chunks
    ledger.begin(flight)
    ledger.end()

    assert ledger.has_ended
    assert chosen(ledger) == []
    assert ledger.num_in_flight == len(flight)
    ledger.settle(flight)
    assert ledger.num_in_flight == 0


def test_hashes_that_arrive_late_are_news() -> None:
    hasher = PrefixHasher(16)
    ledger = RequestLedger(ChunkGrid(a_geometry(a_layout(full_group(16)), 32), hasher.hashes))
    hasher.extend(range(63))
    ledger.advance(64)
    assert store(ledger) == [(0, 0)]
    assert not ledger.has_news
    hasher.extend([63])
    assert store(ledger) == [(0, 1)]


def test_a_chunk_in_flight_stays_so_when_a_hit_loads_it() -> None:
    ledger = ledger_of(HYBRID, 300)
    ledger.advance(64)
    flight = choose_stores(ledger).chunks
    ledger.begin(flight)
    ledger.preempt()
    ledger.resume(choose_load(HYBRID, lookups_with(HYBRID, 288), LoadBounds(300)))

    assert ledger.num_in_flight == len(flight)
    ledger.settle(flight)
    assert all(ledger.progress(ref) is ChunkProgress.STORED for ref in flight)


def test_a_refused_call_changes_nothing() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.advance(64)
    one, two = ChunkRef(FULL, 0), ChunkRef(FULL, 1)
    ledger.begin([one])
    with pytest.raises(ValueError, match="IN_FLIGHT"):
        ledger.begin([two, one])
    with pytest.raises(ValueError, match="named twice"):
        ledger.begin([two, two])
    with pytest.raises(ValueError, match="is OPEN"):
        ledger.settle([one], failed=[two])

    assert ledger.progress(one) is ChunkProgress.IN_FLIGHT
    assert ledger.progress(two) is ChunkProgress.OPEN


def test_nothing_happens_to_an_ended_request() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.end()
    with pytest.raises(ValueError, match="has ended"):
        ledger.advance(64)
    with pytest.raises(ValueError, match="has ended"):
        ledger.offer_state(StateOffer(STATE, 96))


def test_misuse_is_refused() -> None:
    ledger = ledger_of(HYBRID, 200)
    ledger.advance(64)
    ref = ChunkRef(FULL, 0)
    with pytest.raises(ValueError, match="from 64 to 63 without a preemption"):
        ledger.advance(63)
    with pytest.raises(ValueError, match="is OPEN, not in flight"):
        ledger.settle([ref])
    ledger.begin([ref])
    with pytest.raises(ValueError, match="cannot be stored: it is IN_FLIGHT"):
        ledger.begin([ref])
    with pytest.raises(ValueError, match="full group 0 has no states"):
        ledger.offer_state(StateOffer(FULL, 32))
    plan = choose_load(HYBRID, lookups_with(HYBRID, 192), LoadBounds(200))
    with pytest.raises(ValueError, match="cannot resume: 64 tokens are computed"):
        ledger.resume(plan)


def test_what_was_stored_serves_the_next_request() -> None:
    """The two halves agree: every length with a kept state is usable from what was stored."""
    hasher = PrefixHasher(16)
    grid = ChunkGrid(HYBRID, hasher.hashes)
    hasher.extend(range(400))
    ledger = RequestLedger(grid)
    stored: set[bytes] = set()
    for computed in (96, 192, 250, 384, 400):
        ledger.advance(computed)
        if computed % 96 == 0:
            ledger.offer_state(StateOffer(STATE, computed))
        plan = choose_stores(ledger)
        ledger.begin(plan.chunks)
        ledger.settle(plan.chunks)
        stored |= {grid.key(*ref) for ref in plan.chunks}

    lookups = grid.lookup(lambda keys: to_codes(READY if k in stored else ABSENT for k in keys))
    for num_tokens, expected in ((401, 384), (384, 192), (193, 192), (192, 96), (97, 96), (96, 0)):
        assert choose_load(HYBRID, lookups, LoadBounds(num_tokens)).num_tokens == expected
