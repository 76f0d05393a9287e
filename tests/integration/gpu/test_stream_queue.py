"""Needs a GPU: copies on streams of their own move the right bytes, after the right work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.room import PAGE_BYTES, Extent
from kvstrata.transfers.cache_views import CacheViews
from kvstrata.transfers.copiers import make_queue
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob
from kvstrata.transfers.stream_queue import StreamQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BLOCKS, TOKENS = 64, 16
STATE_BYTES = 1003  # no whole words
PAGE = 2 * TOKENS * 8 * 32 * 2


def layout() -> KVLayout:
    return KVLayout(
        groups=(
            KVGroup(
                kind=GroupKind.FULL,
                block_tokens=TOKENS,
                layers=tuple(KVLayer(name, PAGE) for name in ("a", "b", "c")),
            ),
            KVGroup(
                kind=GroupKind.RECURRENT,
                block_tokens=TOKENS,
                layers=(KVLayer("state", STATE_BYTES),),
            ),
        ),
        hash_block_tokens=TOKENS,
        dtype="bfloat16",
    )


class Bench:
    """Caches, an arena, and the queue between."""

    def __init__(self, *, is_pinned: bool) -> None:
        self.caches = {
            name: torch.randn(BLOCKS, 8, TOKENS, 64, dtype=torch.bfloat16, device="cuda")
            for name in ("a", "b", "c")
        }
        padded = torch.randint(-128, 127, (BLOCKS, 1, 1, 2048), dtype=torch.int8, device="cuda")
        self.caches["state"] = padded[..., :STATE_BYTES]
        self.arena = HostArena(4096 * PAGE_BYTES)
        if is_pinned:
            assert self.arena.pin()
        self.views = CacheViews(layout(), self.caches, BLOCKS)
        self.queue = make_queue(self.views, self.arena)
        assert isinstance(self.queue, StreamQueue)

    def run(self, job: CopyJob) -> None:
        self.queue.submit([job])
        assert self.ended() == (job.job_id, False)

    def ended(self) -> tuple[int, bool]:
        """Wait for the next job's end; whether it failed."""
        end = time.monotonic() + 20
        while not (reports := self.queue.take_reports()):
            assert time.monotonic() < end
        [report] = reports
        return report.job_id, bool(report.failed)


@pytest.fixture(params=[True, False], ids=["pinned", "staged"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(is_pinned=request.param)
    yield made
    made.queue.close()
    made.arena.close()


def a_copy(
    bench: Bench, group: int, rows: tuple[int, ...], page: int, *, is_whole: bool = False
) -> ChunkCopy:
    """A chunk in one extent, or in two that do not touch."""
    num_bytes = bench.views.canonical.groups[group].row_bytes * len(rows)
    num_pages = num_bytes // PAGE_BYTES + 1
    whole, apart = (Extent(page, num_pages),), (Extent(page, 1), Extent(page + 2, num_pages))
    extents = whole if is_whole else apart
    key = ChunkKey(page.to_bytes(2, "big"))
    return ChunkCopy(key, GroupId(group), extents, num_bytes, rows)


@pytest.mark.parametrize("is_whole", [True, False], ids=["one extent", "two extents"])
@pytest.mark.parametrize(("group", "rows"), [(0, (3, 9, 4, 60)), (1, (7,))])
def test_rows_come_back_as_they_were(
    bench: Bench, group: int, rows: tuple[int, ...], *, is_whole: bool
) -> None:
    copy = a_copy(bench, group, rows, page=1, is_whole=is_whole)
    before = {name: cache.clone() for name, cache in bench.caches.items()}
    bench.run(CopyJob(1, (copy,)))
    for name, cache in bench.caches.items():
        if (name == "state") == (group == 1):
            cache[list(rows)] = 0

    bench.run(CopyJob(2, (copy,), waiting_request="one"))

    for name, cache in bench.caches.items():
        assert torch.equal(cache, before[name]), name


def test_a_job_has_chunks_of_every_kind(bench: Bench) -> None:
    """All groups, in one extent and in several."""
    copies = (
        a_copy(bench, 0, (3, 9), page=1, is_whole=True),
        a_copy(bench, 1, (7,), page=200),
        a_copy(bench, 0, (5, 4, 8), page=300),
        a_copy(bench, 0, (20,), page=600, is_whole=True),
        a_copy(bench, 1, (30,), page=800, is_whole=True),
    )
    before = {name: cache.clone() for name, cache in bench.caches.items()}
    bench.run(CopyJob(1, copies))
    for name, cache in bench.caches.items():
        cache[[7, 30] if name == "state" else [3, 9, 5, 4, 8, 20]] = 0

    bench.run(CopyJob(2, copies, waiting_request="one"))

    for name, cache in bench.caches.items():
        assert torch.equal(cache, before[name]), name


def test_a_payload_is_piece_after_piece_the_rows_in_their_order(bench: Bench) -> None:
    rows = (11, 2, 40)
    copy = a_copy(bench, 0, rows, page=1)
    bench.run(CopyJob(1, (copy,)))

    stored = b"".join(bytes(part) for part in bench.arena.parts(copy.extents))
    assert (
        stored[: copy.payload_bytes] == bench.views.gather(GroupId(0), rows).cpu().numpy().tobytes()
    )


@pytest.mark.parametrize("is_whole", [True, False], ids=["one extent", "two extents"])
def test_a_part_of_a_chunk_goes_to_other_rows(bench: Bench, *, is_whole: bool) -> None:
    copy = a_copy(bench, 0, (1, 2, 3, 4), page=1, is_whole=is_whole)
    bench.run(CopyJob(1, (copy,)))
    part = ChunkCopy(copy.key, copy.group_id, copy.extents, copy.payload_bytes, (50, 51), 1)
    nothing = ChunkCopy(copy.key, copy.group_id, copy.extents, copy.payload_bytes, (), 0)

    bench.run(CopyJob(2, (nothing, part), waiting_request="one"))

    for name in ("a", "b", "c"):
        assert torch.equal(bench.caches[name][50:52], bench.caches[name][2:4])


def test_a_store_waits_for_what_the_engine_has_launched(bench: Bench) -> None:
    """On any stream of the engine's: late work is in the stored bytes, later work is not."""
    copy = a_copy(bench, 0, (5,), page=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # noqa: SLF001 - about a tenth of a second
        bench.caches["a"][5] = 1.0
        bench.queue.submit([CopyJob(1, (copy,))])
    assert bench.ended() == (1, False)
    bench.caches["a"][5] = 2.0
    torch.cuda.synchronize()

    bench.run(CopyJob(2, (copy,), waiting_request="one"))

    assert bool((bench.caches["a"][5] == 1.0).all())


def test_nobody_waits_for_the_engine_or_a_store() -> None:
    """Submitting returns while the engine's work goes on, and a load ends before a store."""
    bench = Bench(is_pinned=True)
    store, load = a_copy(bench, 0, (5,), page=1), a_copy(bench, 0, (6,), page=300)
    bench.run(CopyJob(1, (load,)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # noqa: SLF001
        bench.queue.submit([CopyJob(2, (store,))])
    bench.queue.submit([CopyJob(3, (load,), waiting_request="one")])

    assert bench.ended() == (3, False)
    assert not stream.query(), "the load has waited for the store"
    assert bench.ended() == (2, False)
    bench.queue.close()
    bench.arena.close()


def test_a_job_that_cannot_be_right_fails_and_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    copy = a_copy(bench, 0, (1, 2), page=1)
    short = ChunkCopy(copy.key, copy.group_id, copy.extents, copy.payload_bytes - 1, copy.rows)
    bench.queue.submit([CopyJob(1, (short,))])

    assert bench.ended() == (1, True)
    assert "copies on cuda" in caplog.text
    bench.run(CopyJob(2, (copy,)))
