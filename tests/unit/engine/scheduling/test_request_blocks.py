from __future__ import annotations

import pytest

from kvstrata.core.ids import GroupId
from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.engine.scheduling.request_blocks import RequestBlocks
from kvstrata.runtime.seam import OfferedState
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

from .driver import a_request

FULL = a_layout(full_group(4))
HYBRID = a_layout(full_group(4), window_group(4, 4), recurrent_group(4))


def free(blocks: RequestBlocks) -> list[int]:
    return [view.block_id for view in blocks.pool.walk_free()]


def test_a_request_needs_at_most_its_blocks_in_every_group() -> None:
    blocks = RequestBlocks(a_layout(full_group(16), recurrent_group(48)), 10)
    assert blocks.most_needed(1) == 2
    assert blocks.most_needed(49) == 4 + 2


def test_a_hit_leaves_a_token_to_compute() -> None:
    blocks = RequestBlocks(FULL, 10)
    first = a_request(FULL, 8)
    blocks.admit(first, blocks.local_hit(first), 8, is_loaded=False)
    blocks.advance(first, 8)
    assert blocks.local_hit(a_request(FULL, 8)).num_tokens == 4
    assert blocks.local_hit(a_request(FULL, 9)).num_tokens == 8


def test_requests_with_different_salts_share_nothing() -> None:
    blocks = RequestBlocks(FULL, 10)
    first = a_request(FULL, 8)
    blocks.admit(first, blocks.local_hit(first), 8, is_loaded=False)
    blocks.advance(first, 8)
    assert blocks.local_hit(a_request(FULL, 9, salt="other")).num_tokens == 0


def test_an_admitted_request_shares_its_hit_and_takes_the_rest() -> None:
    blocks = RequestBlocks(FULL, 10)
    first, second = a_request(FULL, 9), a_request(FULL, 9)
    blocks.admit(first, blocks.local_hit(first), 9, is_loaded=False)
    blocks.advance(first, 9)
    assert blocks.admit(second, blocks.local_hit(second), 9, is_loaded=False)
    assert second.computed == 8
    assert second.tables[0].blocks[:2] == first.tables[0].blocks[:2]
    assert second.tables[0].blocks[2] != first.tables[0].blocks[2]
    assert [blocks.pool.view(b).ref_count for b in second.tables[0].blocks] == [2, 2, 1]


def test_a_request_that_finds_too_few_blocks_changes_nothing() -> None:
    blocks = RequestBlocks(FULL, 4)
    first = a_request(FULL, 9)
    blocks.admit(first, blocks.local_hit(first), 9, is_loaded=False)
    blocks.advance(first, 9)
    blocks.release(first)
    blocks.pool.hold([blocks.pool.take(1)[0]])
    second = a_request(FULL, 9)
    before = free(blocks)
    # Two of the hit are free, so none is left for the third.
    assert not blocks.admit(second, blocks.local_hit(second), 9, is_loaded=False)
    assert free(blocks) == before
    assert not second.tables
    assert second.computed == 0


def test_a_load_takes_no_blocks_for_what_nothing_behind_it_sees() -> None:
    blocks = RequestBlocks(HYBRID, 20)
    request = a_request(HYBRID, 17)
    assert blocks.admit(request, blocks.local_hit(request), 16, is_loaded=True)
    full, window, state = (table.blocks for table in request.tables)
    assert NULL_BLOCK not in full
    assert [block == NULL_BLOCK for block in window] == [True, True, True, False]
    assert [block == NULL_BLOCK for block in state] == [True, True, True, False]


def test_a_growing_request_gives_back_what_it_no_longer_sees() -> None:
    layout = a_layout(window_group(4, 4), recurrent_group(4))
    blocks = RequestBlocks(layout, 9)
    request = a_request(layout, 40)
    blocks.admit(request, blocks.local_hit(request), 8, is_loaded=False)
    for stop in range(12, 44, 4):
        blocks.advance(request, stop - 4)
        assert blocks.extend(request, stop)
        held = sum(block != NULL_BLOCK for table in request.tables for block in table.blocks)
        assert held <= 5
        assert blocks.pool.num_free == 8 - held


def test_a_growing_request_keeps_what_its_next_tokens_see() -> None:
    layout = a_layout(window_group(4, 4), recurrent_group(4))
    blocks = RequestBlocks(layout, 9)
    request = a_request(layout, 40)
    blocks.admit(request, blocks.local_hit(request), 8, is_loaded=False)
    blocks.advance(request, 8)
    window, state = (table.blocks[1] for table in request.tables)
    assert blocks.extend(request, 20)
    assert request.tables[0].blocks[:2] == [NULL_BLOCK, window], "token 8 sees tokens 5 to 8"
    assert request.tables[1].blocks[:2] == [NULL_BLOCK, state], "the next state comes from it"


def test_a_request_that_cannot_grow_keeps_what_it_has() -> None:
    blocks = RequestBlocks(FULL, 3)
    request = a_request(FULL, 20)
    blocks.admit(request, blocks.local_hit(request), 8, is_loaded=False)
    blocks.advance(request, 8)
    assert not blocks.extend(request, 9)
    assert request.tables[0].blocks == [1, 2]
    assert blocks.extend(request, 8)


def test_blocks_are_found_only_when_all_their_tokens_are_computed() -> None:
    blocks = RequestBlocks(HYBRID, 20)
    request = a_request(HYBRID, 9)
    blocks.admit(request, blocks.local_hit(request), 7, is_loaded=False)
    assert blocks.local_hit(a_request(HYBRID, 20)).num_tokens == 0
    blocks.advance(request, 7)
    keys = [blocks.pool.view(block).group_id for block in range(1, 20)]
    assert [group for group in keys if group is not None] == [0, 1]
    assert blocks.local_hit(a_request(HYBRID, 20)).num_tokens == 0, "there is no state at 4"


def test_a_state_is_found_where_a_step_ended_with_its_block() -> None:
    blocks = RequestBlocks(HYBRID, 20)
    request = a_request(HYBRID, 13)
    blocks.admit(request, blocks.local_hit(request), 8, is_loaded=False)
    blocks.advance(request, 8)
    assert blocks.local_hit(a_request(HYBRID, 13)).num_tokens == 8
    assert blocks.extend(request, 13)
    blocks.advance(request, 13)
    assert blocks.local_hit(a_request(HYBRID, 13)).num_tokens == 8, "no step ended at 12"


def test_the_end_of_a_prefix_is_taken_before_its_beginning_in_every_group() -> None:
    layout = a_layout(full_group(4), full_group(12), recurrent_group(4))
    blocks = RequestBlocks(layout, 30)
    request = a_request(layout, 25)
    blocks.admit(request, blocks.local_hit(request), 4, is_loaded=False)
    for stop in (8, 12, 16, 20, 24):
        blocks.advance(request, stop - 4)
        blocks.extend(request, stop)
    blocks.advance(request, 24)
    tables = [list(filter(None, table.blocks)) for table in request.tables]
    starts = {
        block: position * table.block_tokens
        for table in request.tables
        for position, block in enumerate(table.blocks)
    }
    blocks.release(request)
    order = [block for block in free(blocks) if block in starts]
    for table in tables:
        assert [block for block in order if block in table] == table[::-1]
    known = [b for b in order if blocks.pool.view(b).block_hash is not None]
    released = [starts[block] for block in known if block in {b for t in tables for b in t}]
    assert released == sorted(released, reverse=True)


def test_a_released_request_has_nothing_left() -> None:
    blocks = RequestBlocks(HYBRID, 20)
    request = a_request(HYBRID, 9)
    blocks.admit(request, blocks.local_hit(request), 9, is_loaded=False)
    blocks.advance(request, 9)
    blocks.release(request)
    assert request.tables == ()
    assert request.computed == request.loaded == 0
    assert blocks.pool.num_free == 19
    blocks.release(request)
    assert blocks.pool.num_free == 19


@pytest.mark.parametrize(("stop", "offered"), [(7, []), (8, [8]), (12, [12])])
def test_states_are_offered_where_a_step_ends_with_their_block(
    stop: int, offered: list[int]
) -> None:
    blocks = RequestBlocks(HYBRID, 20)
    request = a_request(HYBRID, 30)
    blocks.admit(request, blocks.local_hit(request), stop, is_loaded=False)
    state = request.tables[2].blocks[-1]
    expected = tuple(OfferedState(GroupId(2), state, n) for n in offered)
    assert blocks.offered_states(request, stop) == expected


def test_each_group_offers_its_own_states() -> None:
    layout = a_layout(recurrent_group(4), recurrent_group(6))
    blocks = RequestBlocks(layout, 20)
    request = a_request(layout, 30)
    blocks.admit(request, blocks.local_hit(request), 12, is_loaded=False)
    assert [state.group_id for state in blocks.offered_states(request, 12)] == [0, 1]
    assert [state.group_id for state in blocks.offered_states(request, 8)] == [0]
    assert [state.group_id for state in blocks.offered_states(request, 6)] == [1]
