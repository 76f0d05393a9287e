"""From chunks and tables to rows: the right bytes of the right blocks, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.ids import GroupId
from kvstrata.core.spans import ChunkSpan, RowSpan, TokenSpan
from kvstrata.planning.load_plan import GroupLoad, LoadBounds, LoadPlan, choose_load
from kvstrata.planning.request_ledger import ChunkRef
from kvstrata.testing.builders import (
    a_geometry,
    a_grid,
    a_layout,
    full_group,
    lookups_with,
    recurrent_group,
    window_group,
)
from kvstrata.tiers.room import Extent
from kvstrata.transfers.copy_plans import blocks_of, device_rows, load_copies, rows_to_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.transfers.copy_queue import ChunkCopy

PLACE = (Extent(0, 1),)


def loaded(
    geometry: ChunkGeometry,
    tables: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    local: int = 0,
    most: int | None = None,
) -> list[ChunkCopy]:
    """The copies of the longest hit of a request, with everything in the cache."""
    grid = a_grid(geometry, num_tokens)
    bounds = LoadBounds(num_tokens, local, most)
    plan = choose_load(geometry, lookups_with(geometry, num_tokens), bounds)
    return list(load_copies(grid, plan, tables, lambda _: PLACE))


def test_rows_follow_the_block_table() -> None:
    assert device_rows([7, 3, 9], RowSpan(1, 5), 2) == [15, 6, 7, 18]
    assert device_rows([7, 3, 9], RowSpan(0, 3), 1) == [7, 3, 9]


def test_blocks_of_rows_are_named_once() -> None:
    assert blocks_of([14, 15, 6, 7, 18], 2) == [7, 3, 9]


class TestFullAttention:
    GEOMETRY = a_geometry(a_layout(full_group(16)), 32)

    def test_whole_chunks(self) -> None:
        copies = loaded(self.GEOMETRY, [[5, 6, 7, 8]], num_tokens=65)

        assert [(copy.rows, copy.first_row) for copy in copies] == [((5, 6), 0), ((7, 8), 0)]
        assert {copy.payload_bytes for copy in copies} == {2 * 16 * 64}

    def test_the_last_chunk_in_part(self) -> None:
        copies = loaded(self.GEOMETRY, [[5, 6, 7]], num_tokens=65, most=48)

        assert [(copy.rows, copy.first_row) for copy in copies] == [((5, 6), 0), ((7,), 0)]

    def test_a_chunk_behind_a_local_hit_in_part(self) -> None:
        copies = loaded(self.GEOMETRY, [[5, 6, 7, 8]], num_tokens=65, local=16)

        assert [(copy.rows, copy.first_row) for copy in copies] == [((6,), 1), ((7, 8), 0)]

    def test_stores_name_every_row(self) -> None:
        grid = a_grid(self.GEOMETRY, 64)

        assert rows_to_store(grid, ChunkRef(GroupId(0), 1), [5, 6, 7, 8]) == (7, 8)

    def test_what_is_gone_is_not_stored(self) -> None:
        grid = a_grid(self.GEOMETRY, 64)
        second = ChunkRef(GroupId(0), 1)

        assert rows_to_store(grid, second, [5, 6, 0, 8]) is None
        assert rows_to_store(grid, second, [5, 6, 7]) is None
        assert rows_to_store(grid, second, [5, 6]) is None
        assert rows_to_store(grid, second, []) is None


class TestChunksSmallerThanABlock:
    GEOMETRY = a_geometry(a_layout(full_group(64, kernel=16), hash_block=16), 32)

    def test_loads_fill_a_part_of_the_block(self) -> None:
        copies = loaded(self.GEOMETRY, [[3, 9]], num_tokens=97)

        assert [copy.rows for copy in copies] == [(12, 13), (14, 15), (36, 37)]

    def test_stores_read_a_part_of_the_block(self) -> None:
        grid = a_grid(self.GEOMETRY, 96)

        assert rows_to_store(grid, ChunkRef(GroupId(0), 1), [3, 9]) == (14, 15)
        assert rows_to_store(grid, ChunkRef(GroupId(0), 2), [3, 9]) == (36, 37)
        assert rows_to_store(grid, ChunkRef(GroupId(0), 2), [3]) is None


class TestWindows:
    GEOMETRY = a_geometry(a_layout(window_group(40, 16)), 32)

    def test_rows_without_a_block_are_left_out(self) -> None:
        # 97 tokens hit 96; the window sees [57, 96), so position 3 is the first with a block.
        copies = loaded(self.GEOMETRY, [[0, 0, 0, 4, 5, 6]], num_tokens=97)

        assert [(copy.rows, copy.first_row) for copy in copies] == [((4,), 1), ((5, 6), 0)]

    def test_an_engine_that_keeps_more_gets_what_the_hit_needs(self) -> None:
        copies = loaded(self.GEOMETRY, [[1, 2, 3, 4, 5, 6]], num_tokens=97)

        assert [(copy.rows, copy.first_row) for copy in copies] == [((4,), 1), ((5, 6), 0)]

    def test_a_chunk_without_any_block_is_copied_nowhere(self) -> None:
        grid = a_grid(self.GEOMETRY, 96)
        load = GroupLoad(GroupId(0), ChunkSpan(0, 1), TokenSpan(0, 32))
        plan = LoadPlan(32, 0, 32, 32, (load,), ())
        [copy] = load_copies(grid, plan, [[0, 0]], lambda _: PLACE)

        assert copy.rows == ()


class TestStates:
    GEOMETRY = a_geometry(a_layout(full_group(16), recurrent_group(32)), 16, 32)

    def test_the_state_rests_in_the_last_block(self) -> None:
        copies = loaded(self.GEOMETRY, [[1, 2, 3, 4], [0, 9]], num_tokens=70)
        states = [copy for copy in copies if copy.group_id == 1]

        assert [(copy.rows, copy.first_row) for copy in states] == [((9,), 0)]

    def test_a_state_within_a_block_rests_in_it(self) -> None:
        layout = a_layout(full_group(16), recurrent_group(64, state_tokens=32))
        copies = loaded(a_geometry(layout, 16, 32), [[1, 2], [7]], num_tokens=40)
        states = [copy for copy in copies if copy.group_id == 1]

        assert [copy.rows for copy in states] == [(7,)]
