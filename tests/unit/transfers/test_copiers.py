"""Tensor operations and native copies move the same bytes, and refuse the same jobs."""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
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
from kvstrata.transfers.copiers import make_queue
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob, CopyQueue
from kvstrata.transfers.native_queue import NativeQueue, native_rows
from kvstrata.transfers.plain_copier import PlainCopier

from .cache_layouts import BLOCKS, CASES, KV_PAGE, Case, all_bytes, fill, two_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.transfers.cache_views import LayerCache
    from kvstrata.transfers.copy_queue import Copies, CopyReport
    from kvstrata.transfers.native_queue import Chunk, RowQueue

    MakeCopies = Callable[[CacheViews, HostArena], Copies]

MAKE_ROWS = native_rows()
ARENA_PAGES = 16
KEY = ChunkKey(b"key")
needs_native = pytest.mark.skipif(MAKE_ROWS is None, reason="the native copies were not built")


def plain(views: CacheViews, arena: HostArena) -> Copies:
    return CopyQueue(PlainCopier(views, arena))


def native(views: CacheViews, arena: HostArena) -> Copies:
    assert MAKE_ROWS is not None
    return NativeQueue(views, arena, MAKE_ROWS)


def native_thread(views: CacheViews, arena: HostArena) -> Copies:
    assert MAKE_ROWS is not None
    return NativeQueue(views, arena, MAKE_ROWS, at_once_bytes=0)


NATIVE = [pytest.param(make, marks=needs_native) for make in (native, native_thread)]


@pytest.fixture(params=[plain, *NATIVE])
def make_copies(request: pytest.FixtureRequest) -> MakeCopies:
    make: MakeCopies = request.param
    return make


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(ARENA_PAGES * PAGE_BYTES)
    yield arena
    with contextlib.suppress(BufferError):  # what is logged about a fault may hold a part of it
        arena.close()


def taken(copies: Copies, count: int) -> list[CopyReport]:
    reports: list[CopyReport] = []
    end = time.monotonic() + 10
    while len(reports) < count:
        assert time.monotonic() < end
        reports += copies.take_reports()
        time.sleep(0.0001)
    return reports


def run(copies: Copies, copy: ChunkCopy, direction: str) -> CopyReport:
    """Copy one chunk, and nothing more."""
    copies.submit([CopyJob(7, (copy,), "r" if direction == "load" else None)])
    [report] = taken(copies, 1)
    copies.close()
    assert report.job_id == 7
    assert report.num_bytes == (0 if report.failed else copy.payload_bytes)
    return report


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
    return ChunkCopy(KEY, GroupId(group), extents_for(size), size, tuple(rows), first_row)


def groups_of(case: Case) -> Iterator[tuple[int, int, int]]:
    """Each group with its rows and their bytes."""
    for index, group in enumerate(case.layout.groups):
        num_rows = BLOCKS * group.rows_per_block
        yield index, num_rows, group.block_bytes // group.rows_per_block


@needs_native
def test_caches_in_host_memory_are_copied_by_native_calls(arena: HostArena) -> None:
    case = CASES["int8"]
    copies = make_queue(CacheViews(case.layout, case.make(), BLOCKS), arena)
    copies.close()

    assert isinstance(copies, NativeQueue)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_payload_is_piece_after_piece_the_rows_in_their_order(
    case: Case, make_copies: MakeCopies, arena: HostArena
) -> None:
    views = CacheViews(case.layout, filled(case), BLOCKS)
    for group, num_rows, row_bytes in groups_of(case):
        copy = a_copy(group, [num_rows - 1, 0, 2], row_bytes)
        assert not run(make_copies(views, arena), copy, "store").failed

        expected = bytes(views.gather(GroupId(group), copy.rows).tolist())
        assert bytes_in(arena, copy.extents)[: copy.payload_bytes] == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_of_a_payload_go_where_they_belong_and_nowhere_else(
    case: Case, make_copies: MakeCopies, arena: HostArena
) -> None:
    memory = arena.parts([Extent(0, ARENA_PAGES)])[0]
    memory[:] = bytes(index * 7 % 251 for index in range(len(memory)))
    for group, num_rows, row_bytes in groups_of(case):
        found, expected = filled(case), filled(case)
        copy = a_copy(group, [num_rows - 1, 1], row_bytes, first_row=2)
        views = CacheViews(case.layout, found, BLOCKS)
        assert not run(make_copies(views, arena), copy, "load").failed

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
    stored = ChunkCopy(KEY, GroupId(group), extents, row_bytes * len(rows), tuple(rows))
    loaded = ChunkCopy(KEY, GroupId(group), extents, size, tuple(rows[:num_loaded]), first_row)

    outcomes = []
    for make in (plain, native, native_thread):
        caches, arena = filled(case), HostArena(ARENA_PAGES * PAGE_BYTES)
        views = CacheViews(case.layout, caches, BLOCKS)
        assert not run(make(views, arena), stored, "store").failed
        after_store = bytes_in(arena)
        assert not run(make(views, arena), loaded, "load").failed
        outcomes.append((after_store, bytes_in(arena), all_bytes(caches)))
        arena.close()

    assert outcomes[0] == outcomes[1] == outcomes[2]


ROW = 2 * KV_PAGE
REFUSED = {
    "a row behind the last": a_copy(0, [1, BLOCKS], ROW),
    "a negative row": a_copy(0, [-1], ROW),
    "a payload of another size": ChunkCopy(KEY, GroupId(0), (Extent(0, 1),), 5, (1,)),
    "more rows than the payload has": ChunkCopy(KEY, GroupId(0), (Extent(0, 1),), ROW, (1, 2)),
    "too little room": ChunkCopy(KEY, GroupId(0), (), ROW, (1,)),
    "room behind the end": ChunkCopy(KEY, GroupId(0), (Extent(ARENA_PAGES, 1),), ROW, (1,)),
    "no such group": a_copy(1, [1], ROW),
}


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("copy", REFUSED.values(), ids=REFUSED)
def test_a_job_that_cannot_be_right_fails(
    copy: ChunkCopy, direction: str, make_copies: MakeCopies, arena: HostArena
) -> None:
    caches = filled(CASES["keys and values split in the second axis"])
    copies = make_copies(CacheViews(two_layers(), caches, BLOCKS), arena)
    before = all_bytes(caches), bytes_in(arena)

    assert run(copies, copy, direction).failed == {KEY}

    if isinstance(copies, NativeQueue):  # tensor operations find bad rows on their way
        assert (all_bytes(caches), bytes_in(arena)) == before


@needs_native
def test_small_jobs_are_done_when_they_are_submitted(arena: HostArena) -> None:
    case = CASES["int8"]
    copies = native(CacheViews(case.layout, case.make(), BLOCKS), arena)
    copies.submit([CopyJob(1, (a_copy(0, [1], 2 * KV_PAGE // 2),))])

    assert [report.job_id for report in copies.take_reports()] == [1]
    copies.close()


class TestTheQueue:
    """What both queues promise, whoever copies."""

    def test_every_job_is_reported_once(self, make_copies: MakeCopies, arena: HostArena) -> None:
        caches = filled(CASES["keys and values split in the second axis"])
        copies = make_copies(CacheViews(two_layers(), caches, BLOCKS), arena)
        for number in range(50):
            waiting = "r" if number % 3 else None
            copies.submit([CopyJob(number, (a_copy(0, [1, 2], ROW), a_copy(0, [3], ROW)), waiting)])
        reports = taken(copies, 50)

        assert sorted(report.job_id for report in reports) == list(range(50))
        assert {report.num_bytes for report in reports} == {3 * ROW}
        assert all(not report.failed and report.seconds >= 0 for report in reports)
        assert copies.take_reports() == []
        copies.close()

    def test_nothing_to_copy_is_done_at_once(
        self, make_copies: MakeCopies, arena: HostArena
    ) -> None:
        caches = filled(CASES["keys and values split in the second axis"])
        copies = make_copies(CacheViews(two_layers(), caches, BLOCKS), arena)
        copies.submit([])
        copies.submit([CopyJob(1, (), "r")])

        assert [report.job_id for report in taken(copies, 1)] == [1]
        copies.close()
        copies.close()

    def test_what_is_under_way_when_it_closes_holds_no_memory(
        self, make_copies: MakeCopies
    ) -> None:
        caches = filled(CASES["keys and values split in the second axis"])
        views, arena = CacheViews(two_layers(), caches, BLOCKS), HostArena(PAGE_BYTES)
        copies = make_copies(views, arena)
        job = CopyJob(
            1, tuple(ChunkCopy(KEY, GroupId(0), (Extent(0, 1),), ROW, (1,)) for _ in "ab")
        )
        copies.submit([job] * 100)
        copies.close()

        arena.close()


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


def work_off(rows: RowQueue, job_id: int, *, is_load: bool, chunk: Chunk) -> None:
    rows.submit(job_id, is_load, (chunk,))
    while not (done := rows.take()):
        time.sleep(0.0001)
    assert [(number, size) for number, size, _ in done] == [(job_id, chunk[2])]


@needs_native
@given(st.data())
def test_extents_may_cut_a_payload_anywhere(data: st.DataObject) -> None:
    """With pages of a byte, so that they can."""
    assert MAKE_ROWS is not None
    memory = data.draw(memories())
    rows = tuple(data.draw(st.permutations(range(memory.num_rows)))[: data.draw(st.integers(0, 6))])
    size = sum(memory.lengths) * len(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    arena = memoryview(bytearray(size + 4))
    extents = tuple(Extent(a, b - a) for a, b in itertools.pairwise([0, *cuts, size + 4]))
    before = memory.content.clone()
    at_once_bytes = data.draw(st.sampled_from([0, 2**20]))
    queue = MAKE_ROWS(arena, 1, ((memory.packed, memory.num_rows),), at_once_bytes)
    thread = threading.Thread(target=queue.work)
    thread.start()

    work_off(queue, 1, is_load=False, chunk=(0, extents, size, rows, 0))
    assert bytes(arena) == memory.rows(rows) + bytes(4)
    assert torch.equal(memory.content, before)

    memory.content.zero_()
    work_off(queue, 2, is_load=True, chunk=(0, extents, size, rows, 0))
    assert memory.rows(rows) == bytes(arena[:size])
    assert int(memory.content.count_nonzero()) <= size
    queue.close()
    thread.join()


CONTENT = torch.zeros(64, dtype=torch.uint8)
PIECES = struct.pack("=qqq", CONTENT.data_ptr(), 8, 8)
ONE = (Extent(0, 1),)


@needs_native
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, ONE, 8, (0,), 0)],
        ((0, ONE, 8, (0,)),),
        ([0, ONE, 8, (0,), 0],),
        ((0, (0, 1), 8, (0,), 0),),
        ((0, [Extent(0, 1)], 8, (0,), 0),),
        ((0, ((0,),), 8, (0,), 0),),
        ((0, ((2**70, 1),), 8, (0,), 0),),
        ((0, (Extent(2**62, 1),), 8, (0,), 0),),
        ((0, (Extent(0, 2**62),), 8, (0,), 0),),
        ((0, (Extent(-1, 1),), 8, (0,), 0),),
        ((0, (Extent(1, -1),), 8, (0,), 0),),
        ((0, (Extent(4, 1),), 8, (0,), 0),),
        ((1, ONE, 8, (0,), 0),),
        ((-1, ONE, 8, (0,), 0),),
        ((0, ONE, 8, (4,), 0),),
        ((0, ONE, 8, (-1,), 0),),
        ((0, ONE, 8, (2**70,), 0),),
        ((0, ONE, 8, ("0",), 0),),
        ((0, ONE, 8, [0], 0),),
        ((0, ONE, -8, (0,), 0),),
        ((0, ONE, 9, (0,), 0),),
        ((0, ONE, 16, (0, 1), 0),),
        ((0, ONE, 8, (0,), 1),),
        ((0, ONE, 8, (0,), -1),),
        ((0, ONE, 8, (0,), 2**62),),
        ((0, ONE, 8, (0,), 0), (0, (), 8, (0,), 0)),
    ],
)
@pytest.mark.parametrize("is_load", [True, False])
def test_native_queues_check_what_they_are_given(chunks: object, *, is_load: bool) -> None:
    assert MAKE_ROWS is not None
    queue = MAKE_ROWS(memoryview(bytearray(32)), 8, ((PIECES, 4),), 64)

    with pytest.raises((ValueError, IndexError, TypeError, OverflowError)):
        queue.submit(1, is_load, chunks)  # type: ignore[arg-type]

    assert queue.take() == []
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.submit(1, is_load, ())


@needs_native
@pytest.mark.parametrize(
    ("arena", "page_bytes", "groups"),
    [
        (bytes(32), 8, ((PIECES, 4),)),
        (bytearray(32), 0, ((PIECES, 4),)),
        (bytearray(32), -8, ((PIECES, 4),)),
        (bytearray(32), 8, [(PIECES, 4)]),
        (bytearray(32), 8, (PIECES,)),
        (bytearray(32), 8, ((PIECES,),)),
        (bytearray(32), 8, ((b"", 4),)),
        (bytearray(32), 8, ((PIECES[:-1], 4),)),
        (bytearray(32), 8, ((struct.pack("=qqq", 0, 8, 8), 4),)),
        (bytearray(32), 8, ((struct.pack("=qqq", 1, -8, 8), 4),)),
        (bytearray(32), 8, ((PIECES, 4), (struct.pack("=qqq", 1, 8, 0), 4))),
    ],
)
def test_native_queues_are_not_made_of_nonsense(
    arena: bytes | bytearray, page_bytes: int, groups: tuple[tuple[bytes, int], ...]
) -> None:
    assert MAKE_ROWS is not None
    with pytest.raises((ValueError, TypeError, BufferError)):
        MAKE_ROWS(memoryview(arena), page_bytes, groups, 0)


@needs_native
def test_a_native_queue_that_nobody_closes_holds_nothing_up() -> None:
    assert MAKE_ROWS is not None
    arena = bytearray(32)
    queue = MAKE_ROWS(memoryview(arena), 8, ((PIECES, 4),), 0)
    queue.submit(1, False, ((0, ONE, 8, (0,), 0),))  # noqa: FBT003
    with pytest.raises(BufferError):
        arena.append(0)
    del queue

    arena.append(0)
