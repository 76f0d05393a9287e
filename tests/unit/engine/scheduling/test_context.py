from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.engine.scheduling.context import EngineContext
from kvstrata.engine.scheduling.request_blocks import RequestBlocks
from kvstrata.testing.builders import a_layout, full_group, recurrent_group

from .driver import a_request

if TYPE_CHECKING:
    from kvstrata.engine.scheduling.request import Request

LAYOUT = a_layout(full_group(4), recurrent_group(4))


class Fixture:
    """A context and what is behind it."""

    def __init__(self) -> None:
        self.blocks = RequestBlocks(LAYOUT, 10)
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.context = EngineContext(self.blocks, self.requests, lambda: list(self.waiting))

    def admit(self, num_tokens: int) -> Request:
        request = a_request(LAYOUT, num_tokens)
        self.blocks.admit(request, self.blocks.local_hit(request), num_tokens, is_loaded=False)
        self.blocks.advance(request, num_tokens)
        self.requests[request.request_id] = request
        return request


def test_a_touched_block_is_not_free_until_it_is_let_go() -> None:
    fixture = Fixture()
    request = fixture.admit(4)
    block = request.tables[0].blocks[0]
    fixture.context.touch([block])
    fixture.blocks.release(request)
    assert fixture.context.get_block(block).ref_count == 1
    assert block not in [view.block_id for view in fixture.context.iter_free_blocks()]
    fixture.context.free_blocks([block])
    assert [view.block_id for view in fixture.context.iter_free_blocks()][-1] == block


def test_a_free_block_keeps_its_content_while_it_is_touched() -> None:
    fixture = Fixture()
    request = fixture.admit(4)
    block = request.tables[0].blocks[0]
    fixture.blocks.release(request)
    fixture.context.touch([block])
    fixture.blocks.pool.take(fixture.blocks.pool.num_free)
    view = fixture.context.get_block(block)
    assert (view.block_hash, view.group_id) == (request.hashes[0], 0)


def test_the_free_queue_goes_on_behind_a_view() -> None:
    context = Fixture().context
    views = list(context.iter_free_blocks())
    assert [view.block_id for view in views] == list(range(1, 10))
    assert list(context.iter_free_blocks(views[3])) == views[4:]


def test_the_free_queue_goes_on_where_a_block_stood_that_has_left_or_come_back() -> None:
    context = Fixture().context
    views = list(context.iter_free_blocks())
    context.touch([4, 6])
    assert [view.block_id for view in context.iter_free_blocks(views[3])] == [5, 7, 8, 9]
    context.free_blocks([4])
    assert [view.block_id for view in context.iter_free_blocks(views[3])] == [5, 7, 8, 9]


def test_the_free_queue_starts_again_behind_a_block_that_was_not_free() -> None:
    fixture = Fixture()
    block = fixture.admit(4).tables[0].blocks[0]
    view = fixture.context.get_block(block)
    everything = list(fixture.context.iter_free_blocks())
    assert list(fixture.context.iter_free_blocks(view)) == everything


def test_blocks_may_be_touched_and_freed_during_a_walk() -> None:
    context = Fixture().context
    seen = []
    for view in context.iter_free_blocks():
        seen.append(view.block_id)
        context.touch([view.block_id])
        context.free_blocks([view.block_id])
    assert seen == list(range(1, 10))


def test_a_request_s_blocks_are_listed_by_group() -> None:
    fixture = Fixture()
    request = fixture.admit(8)
    tables = tuple(tuple(table.blocks) for table in request.tables)
    assert fixture.context.request_blocks("r") == tables
    fixture.blocks.release(request)
    assert fixture.context.request_blocks("r") == ((), ())


def test_an_unknown_request_has_no_blocks() -> None:
    assert Fixture().context.request_blocks("nobody") == ((), ())


def test_waiting_requests_are_listed_as_they_are_now() -> None:
    fixture = Fixture()
    assert list(fixture.context.waiting_requests()) == []
    fixture.waiting += ["a", "b"]
    assert list(fixture.context.waiting_requests()) == ["a", "b"]
