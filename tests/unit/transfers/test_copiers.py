"""Tensor operations and native calls move the same bytes, and refuse the same jobs."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.spans import ceil_div
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.room import PAGE_BYTES, Extent
from kvstrata.transfers.cache_views import CacheViews
from kvstrata.transfers.copy_queue import ChunkCopy
from kvstrata.transfers.native_copier import NativeCopier, native_calls
from kvstrata.transfers.plain_copier import PlainCopier

from .cache_layouts import BLOCKS, CASES, KV_PAGE, Case, all_bytes, fill, two_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.transfers.cache_views import LayerCache
    from kvstrata.transfers.copy_queue import ChunkCopier

    MakeCopier = Callable[[CacheViews, HostArena], ChunkCopier]

CALLS = native_calls()
ARENA_PAGES = 16
needs_native = pytest.mark.skipif(CALLS is None, reason="the native copies were not built")


def native(views: CacheViews, arena: HostArena) -> ChunkCopier:
    assert CALLS is not None
    return NativeCopier(views, arena, CALLS)


@pytest.fixture(params=[PlainCopier, pytest.param(native, marks=needs_native)])
def make_copier(request: pytest.FixtureRequest) -> MakeCopier:
    make: MakeCopier = request.param
    return make


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(ARENA_PAGES * PAGE_BYTES)
    yield arena
    arena.close()


def bytes_in(arena: HostArena, extents: Sequence[Extent] = (Extent(0, ARENA_PAGES),)) -> bytes:
    return b"".join(bytes(part) for part in arena.parts(extents))


def filled(case: Case) -> dict[str, LayerCache]:
    caches = case.make()
    for seed, cache in enumerate(caches.values()):
        fill(cache, seed)
    return caches


def extents_for(num_bytes: int) -> tuple[Extent, ...]:
    """Pages out of order, so that payloads of more than a page lie in parts."""
    num_pages = ceil_div(num_bytes, PAGE_BYTES)
    return tuple(Extent(ARENA_PAGES - 2 * page - 1, 1) for page in range(num_pages))


def a_copy(group: int, rows: Sequence[int], row_bytes: int, first_row: int = 0) -> ChunkCopy:
    size = row_bytes * (first_row + len(rows))
    return ChunkCopy(
        ChunkKey(b"key"), GroupId(group), extents_for(size), size, tuple(rows), first_row
    )


def groups_of(case: Case) -> Iterator[tuple[int, int, int]]:
    """Each group with its rows and their bytes."""
    for index, group in enumerate(case.layout.groups):
        num_rows = BLOCKS * group.rows_per_block
        yield index, num_rows, group.block_bytes // group.rows_per_block


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_payload_is_piece_after_piece_the_rows_in_their_order(
    case: Case, make_copier: MakeCopier, arena: HostArena
) -> None:
    views = CacheViews(case.layout, filled(case), BLOCKS)
    for group, num_rows, row_bytes in groups_of(case):
        copy = a_copy(group, [num_rows - 1, 0, 2], row_bytes)
        make_copier(views, arena).store(copy)

        expected = bytes(views.gather(GroupId(group), copy.rows).tolist())
        assert bytes_in(arena, copy.extents)[: copy.payload_bytes] == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_of_a_payload_go_where_they_belong_and_nowhere_else(
    case: Case, make_copier: MakeCopier, arena: HostArena
) -> None:
    memory = arena.parts([Extent(0, ARENA_PAGES)])[0]
    memory[:] = bytes(index * 7 % 251 for index in range(len(memory)))
    for group, num_rows, row_bytes in groups_of(case):
        found, expected = filled(case), filled(case)
        copy = a_copy(group, [num_rows - 1, 1], row_bytes, first_row=2)
        make_copier(CacheViews(case.layout, found, BLOCKS), arena).load(copy)

        payload = bytearray(bytes_in(arena, copy.extents)[: copy.payload_bytes])
        CacheViews(case.layout, expected, BLOCKS).scatter(
            GroupId(group), copy.rows, torch.frombuffer(payload, dtype=torch.uint8), first_row=2
        )
        assert all_bytes(found) == all_bytes(expected)
    memory.release()


@needs_native
@given(st.data())
def test_both_move_the_same_bytes(data: st.DataObject) -> None:
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    group, num_rows, row_bytes = data.draw(st.sampled_from(list(groups_of(case))))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5, unique=True))
    first_row, num_loaded = data.draw(st.integers(0, 2)), data.draw(st.integers(0, len(rows)))
    size = row_bytes * (first_row + len(rows))
    extents = tuple(data.draw(st.permutations(extents_for(size))))
    key, loaded = ChunkKey(b""), tuple(rows[:num_loaded])
    store = ChunkCopy(key, GroupId(group), extents, row_bytes * len(rows), tuple(rows))
    load = ChunkCopy(key, GroupId(group), extents, size, loaded, first_row)

    outcomes = []
    for make in (PlainCopier, native):
        caches, arena = filled(case), HostArena(ARENA_PAGES * PAGE_BYTES)
        copier = make(CacheViews(case.layout, caches, BLOCKS), arena)
        copier.store(store)
        stored = bytes_in(arena)
        copier.load(load)
        outcomes.append((stored, bytes_in(arena), all_bytes(caches)))
        arena.close()

    assert outcomes[0] == outcomes[1]


ROW = 2 * KV_PAGE
REFUSED = {
    "a row behind the last": a_copy(0, [1, BLOCKS], ROW),
    "a negative row": a_copy(0, [-1], ROW),
    "a payload of another size": ChunkCopy(ChunkKey(b""), GroupId(0), (Extent(0, 1),), 5, (1,)),
    "more rows than the payload has": ChunkCopy(
        ChunkKey(b""), GroupId(0), (Extent(0, 1),), ROW, (1, 2)
    ),
    "too little room": ChunkCopy(ChunkKey(b""), GroupId(0), (), ROW, (1,)),
    "no such group": a_copy(1, [1], ROW),
}


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("copy", REFUSED.values(), ids=REFUSED)
def test_a_job_that_cannot_be_right_is_refused(
    copy: ChunkCopy, direction: str, make_copier: MakeCopier, arena: HostArena
) -> None:
    caches = filled(CASES["keys and values split in the second axis"])
    copier = make_copier(CacheViews(two_layers(), caches, BLOCKS), arena)
    before = all_bytes(caches), bytes_in(arena)

    with pytest.raises((ValueError, IndexError, RuntimeError)):
        getattr(copier, direction)(copy)

    if isinstance(copier, NativeCopier):  # tensor operations find bad rows on their way
        assert (all_bytes(caches), bytes_in(arena)) == before


class Memory(NamedTuple):
    """Rows of two pieces somewhere in a block of bytes."""

    content: torch.Tensor
    strides: tuple[int, int]
    lengths: tuple[int, int]
    num_rows: int

    @property
    def starts(self) -> tuple[int, int]:
        return 3, 3 + self.strides[0] * self.num_rows + 1

    @property
    def packed(self) -> bytes:
        address = self.content.data_ptr()
        facts = zip(self.starts, self.strides, self.lengths, strict=True)
        return b"".join(struct.pack("=qqq", address + at, *rest) for at, *rest in facts)

    def rows(self, rows: Sequence[int]) -> bytes:
        places = [
            (start + row * stride, length)
            for start, stride, length in zip(self.starts, self.strides, self.lengths, strict=True)
            for row in rows
        ]
        return b"".join(bytes(self.content[at : at + size].tolist()) for at, size in places)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    lengths = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    strides = (lengths[0] + draw(st.integers(0, 5)), lengths[1] + draw(st.integers(0, 5)))
    num_rows = draw(st.integers(1, 6))
    size = 8 + sum(strides) * num_rows
    return Memory(torch.arange(size, dtype=torch.uint8), strides, lengths, num_rows)


@needs_native
@given(st.data())
def test_a_payload_may_be_cut_anywhere(data: st.DataObject) -> None:
    assert CALLS is not None
    memory = data.draw(memories())
    rows = data.draw(st.permutations(range(memory.num_rows)))[: data.draw(st.integers(0, 6))]
    size = sum(memory.lengths) * len(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    room = memoryview(bytearray(size + 4))
    parts = tuple(room[a:b] for a, b in itertools.pairwise([0, *cuts, size + 4]))
    before = memory.content.clone()

    CALLS.store(memory.packed, memory.num_rows, tuple(rows), parts, size, 0)
    assert bytes(room) == memory.rows(rows) + bytes(4)
    assert torch.equal(memory.content, before)

    memory.content.zero_()
    CALLS.load(memory.packed, memory.num_rows, tuple(rows), parts, size, 0)
    assert memory.rows(rows) == bytes(room[:size])
    assert int(memory.content.count_nonzero()) <= size


PIECES = struct.pack("=qqq", torch.zeros(64, dtype=torch.uint8).data_ptr(), 8, 8)
ONE = memoryview(bytearray(8))


@needs_native
@pytest.mark.parametrize(
    "arguments",
    [
        (b"", 4, (), (), 0, 0),
        (PIECES[:-1], 4, (0,), (ONE,), 8, 0),
        (struct.pack("=qqq", 0, 8, 8), 4, (0,), (ONE,), 8, 0),
        (struct.pack("=qqq", 1, -8, 8), 4, (0,), (ONE,), 8, 0),
        (struct.pack("=qqq", 1, 8, 0), 4, (0,), (ONE,), 8, 0),
        (PIECES, 4, (4,), (ONE,), 8, 0),
        (PIECES, 4, (-1,), (ONE,), 8, 0),
        (PIECES, -4, (0,), (ONE,), 8, 0),
        (PIECES, 4, (2**70,), (ONE,), 8, 0),
        (PIECES, 4, ("0",), (ONE,), 8, 0),
        (PIECES, 4, [0], (ONE,), 8, 0),
        (PIECES, 4, (0,), (ONE,), -8, 0),
        (PIECES, 4, (0,), (ONE,), 9, 0),
        (PIECES, 4, (0,), (ONE,), 16, 0),
        (PIECES, 4, (0,), (ONE,), 8, 1),
        (PIECES, 4, (0,), (ONE,), 8, -1),
        (PIECES, 4, (0,), (ONE,), 8, 2**62),
        (PIECES, 4, (0,), (ONE[:7],), 8, 0),
        (PIECES, 4, (0,), (ONE[::2],), 8, 0),
        (PIECES, 4, (0,), (None,), 8, 0),
        (PIECES, 4, (0,), (ONE,), 8),
    ],
)
def test_native_calls_check_what_they_are_given(arguments: tuple[object, ...]) -> None:
    assert CALLS is not None
    for call in (CALLS.load, CALLS.store):
        with pytest.raises((ValueError, IndexError, TypeError, OverflowError, BufferError)):
            call(*arguments)  # type: ignore[arg-type]


@needs_native
def test_native_stores_want_memory_that_can_be_written() -> None:
    assert CALLS is not None
    with pytest.raises(BufferError):
        CALLS.store(PIECES, 4, (0,), (memoryview(bytes(8)),), 8, 0)
