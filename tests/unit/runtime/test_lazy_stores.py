"""A chunk is stored when its blocks are about to be taken, and only if they still hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.config.schema import StoreConfig
from kvstrata.core.ids import GroupId
from kvstrata.runtime.lazy_stores import LazyStores
from kvstrata.runtime.seam import OfferedState, RequestProgress, StepProgress
from kvstrata.runtime.storing import choose_sources
from kvstrata.testing.builders import a_geometry, a_layout, full_group, recurrent_group

from .requests import PoolContext, a_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.runtime.store_jobs import StoreSource
    from kvstrata.runtime.tracked_request import TrackedRequest

IDLE = StepProgress(())
FULL = GroupId(0)
ONE_BLOCK = a_geometry(a_layout(full_group(16)), 16)
TWO_BLOCKS = a_geometry(a_layout(full_group(16)), 32)
HALF_A_BLOCK = a_geometry(a_layout(full_group(64, kernel=16), hash_block=16), 32)


class Rig:
    """Requests that compute and end, one after the other."""

    def __init__(self, geometry: ChunkGeometry, num_blocks: int = 30) -> None:
        self.geometry = geometry
        self.context = PoolContext(num_blocks)
        self.pool = self.context.pool
        self.lazy = LazyStores(self.context, geometry)

    def compute(self, request: TrackedRequest, num_tokens: int) -> list[int]:
        """One step up to here, in fresh blocks; what it completed becomes a candidate."""
        size = self.geometry.groups[FULL].group.block_tokens
        blocks = self.pool.take(-(-num_tokens // size))
        self.context.tables[request.request_id] = (blocks,)
        progress = RequestProgress(request.request_id, num_tokens)
        self.lazy.remember(request.grid, self.sources(request, progress))
        self.context.complete(request, FULL, blocks[: num_tokens // size])
        return blocks

    def sources(self, request: TrackedRequest, progress: RequestProgress) -> list[StoreSource]:
        return choose_sources(StoreConfig(mode="lazy"), request, progress, self.context)

    def leaving(self) -> list[tuple[int, tuple[int, ...]]]:
        """The chunks that would be stored now: where they start, and their rows."""
        return starts(self.lazy.about_to_leave(IDLE))


def starts(sources: Sequence[StoreSource]) -> list[tuple[int, tuple[int, ...]]]:
    return [(source.label.tokens.start, source.rows) for source in sources]


def test_nothing_is_stored_while_its_blocks_are_held() -> None:
    rig = Rig(ONE_BLOCK)
    blocks = rig.compute(a_request(ONE_BLOCK, 33), 33)

    assert rig.leaving() == []
    rig.pool.release(blocks)
    assert rig.leaving() == [(0, (blocks[0],)), (16, (blocks[1],))]
    assert rig.leaving() == [], "it is handed over once"
    assert len(rig.lazy) == 0


def test_only_the_front_of_the_queue_is_looked_at() -> None:
    rig = Rig(ONE_BLOCK, num_blocks=2000)
    blocks = rig.compute(a_request(ONE_BLOCK, 33), 33)
    rig.pool.release(blocks)

    assert rig.leaving() == [], "a thousand others are taken before"
    assert len(rig.lazy) == 2


def test_a_block_that_was_reused_is_not_stored() -> None:
    rig = Rig(ONE_BLOCK, num_blocks=3)
    request = a_request(ONE_BLOCK, 33)
    blocks = rig.compute(request, 32)
    rig.pool.release(blocks)
    taken = rig.pool.take(1)

    assert taken == blocks[:1]
    assert rig.leaving() == [(16, (blocks[1],))]
    rig.pool.release(taken)
    assert rig.leaving() == []
    assert len(rig.lazy) == 0


def test_a_chunk_of_which_one_block_is_gone_is_not_stored() -> None:
    rig = Rig(TWO_BLOCKS, num_blocks=3)
    blocks = rig.compute(a_request(TWO_BLOCKS, 33), 32)
    rig.pool.release(blocks)
    rig.pool.take(1)

    assert rig.leaving() == []


def test_what_was_forgotten_by_a_reset_is_not_stored() -> None:
    rig = Rig(ONE_BLOCK)
    rig.pool.release(rig.compute(a_request(ONE_BLOCK, 33), 33))
    rig.pool.forget_all()

    assert rig.leaving() == []
    assert len(rig.lazy) == 0


def test_the_same_chunk_in_two_places_is_stored_from_the_one_that_is_known() -> None:
    rig = Rig(ONE_BLOCK)
    first = rig.compute(a_request(ONE_BLOCK, 17, name="first"), 17)
    second = rig.compute(a_request(ONE_BLOCK, 17, name="second"), 17)
    rig.pool.release(second)
    assert rig.leaving() == [], "its block cannot be found, so nothing tells what it holds"
    rig.pool.release(first)

    assert rig.leaving() == [(0, (first[0],))]


def test_the_same_chunk_in_the_same_block_is_one_candidate() -> None:
    rig = Rig(ONE_BLOCK)
    request = a_request(ONE_BLOCK, 17, name="first")
    blocks = rig.compute(request, 17)
    again = a_request(ONE_BLOCK, 17, name="again")
    rig.context.tables["again"] = (blocks,)
    rig.lazy.remember(again.grid, rig.sources(again, RequestProgress("again", 17)))

    assert len(rig.lazy) == 1
    rig.pool.release(blocks)
    assert rig.leaving() == [(0, (blocks[0],))]


class TestChunksSmallerThanABlock:
    def test_every_part_of_a_block_is_stored(self) -> None:
        rig = Rig(HALF_A_BLOCK)
        [block, *rest] = rig.compute(a_request(HALF_A_BLOCK, 70), 70)
        rig.pool.release([block, *rest])

        assert rig.leaving() == [
            (0, (4 * block, 4 * block + 1)),
            (32, (4 * block + 2, 4 * block + 3)),
        ]

    def test_parts_of_a_block_that_is_not_complete_cost_nothing(self) -> None:
        rig = Rig(HALF_A_BLOCK)
        rig.pool.release(rig.compute(a_request(HALF_A_BLOCK, 40), 40))

        assert rig.leaving() == [], "nothing tells what an incomplete block holds"
        assert len(rig.lazy) == 0

    def test_a_block_has_no_more_candidates_than_parts(self) -> None:
        rig = Rig(HALF_A_BLOCK, num_blocks=2)
        for number in range(5):
            request = a_request(HALF_A_BLOCK, 64 + number, name=str(number))
            blocks = rig.compute(request, 64)
            rig.pool.release(blocks)
        assert len(rig.lazy) == 2


class TestStates:
    def offer(self, geometry: ChunkGeometry, num_tokens: int) -> tuple[Rig, int]:
        """A state after so many tokens, in a block that is then completed and let go."""
        rig = Rig(geometry)
        request = a_request(geometry, 200)
        attention = rig.pool.take(20)
        [block] = rig.pool.take(1)
        rig.context.tables["request"] = (attention, [block])
        state = OfferedState(GroupId(1), block, num_tokens)
        progress = RequestProgress("request", num_tokens, (state,))
        rig.lazy.remember(request.grid, rig.sources(request, progress))
        rig.context.complete(request, GroupId(1), [block])
        rig.pool.release([block])
        return rig, block

    def test_a_state_at_the_end_of_a_block_is_stored(self) -> None:
        geometry = a_geometry(a_layout(full_group(16), recurrent_group(64)), 16, 64)
        rig, block = self.offer(geometry, 64)

        assert rig.leaving() == [(0, (block,))]

    def test_a_state_within_a_block_is_not_as_the_next_one_takes_its_place(self) -> None:
        layout = a_layout(full_group(16), recurrent_group(64, state_tokens=32))
        rig, _ = self.offer(a_geometry(layout, 16, 32), 32)

        assert rig.leaving() == []
