"""From a request's progress to stores: what is worth it, within what was allowed."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.config.schema import StoreConfig
from kvstrata.core.ids import GroupId
from kvstrata.planning.request_ledger import ChunkProgress, ChunkRef
from kvstrata.runtime.seam import OfferedState, RequestLimits, RequestProgress
from kvstrata.runtime.store_jobs import StoreJobs
from kvstrata.runtime.storing import choose_sources
from kvstrata.testing.builders import (
    a_geometry,
    a_layout,
    full_group,
    recurrent_group,
    window_group,
)
from kvstrata.transfers.copy_queue import CopyReport

from .requests import PoolContext, a_host, a_request

GEOMETRY = a_geometry(a_layout(full_group(16)), 32)
EAGER = StoreConfig()


def ends(config: StoreConfig, limits: RequestLimits, *, prompt: int = 100) -> list[int]:
    """Where the chunks end that a request of 200 tokens would store."""
    context = PoolContext()
    request = a_request(GEOMETRY, 200, num_prompt_tokens=prompt, limits=limits)
    context.tables["request"] = (context.pool.take(13),)
    sources = choose_sources(config, request, RequestProgress("request", 200), context)
    return [source.label.tokens.stop for source in sources]


@pytest.mark.parametrize(
    ("config", "limits", "expected"),
    [
        (EAGER, RequestLimits(), [32, 64, 96, 128, 160, 192]),
        (StoreConfig(decode=False), RequestLimits(), [32, 64, 96]),
        (EAGER, RequestLimits(max_offload_tokens=70), [32, 64]),
        (EAGER, RequestLimits(max_offload_tokens=0), []),
        (StoreConfig(decode=False), RequestLimits(max_offload_tokens=70), [32, 64]),
        (StoreConfig(decode=False), RequestLimits(max_offload_tokens=150), [32, 64, 96]),
        (StoreConfig(mode="off"), RequestLimits(), []),
        (EAGER, RequestLimits(max_load_tokens=0), [32, 64, 96, 128, 160, 192]),
    ],
)
def test_limits(config: StoreConfig, limits: RequestLimits, expected: list[int]) -> None:
    assert ends(config, limits) == expected


def test_progress_is_followed_though_nothing_is_stored() -> None:
    request = a_request(GEOMETRY, 200)
    context = PoolContext()
    choose_sources(StoreConfig(mode="off"), request, RequestProgress("request", 64), context)

    assert request.ledger.computed_tokens == 64


def test_windows_that_are_gone_are_left_out() -> None:
    geometry = a_geometry(a_layout(window_group(16, 16)), 16)
    context = PoolContext()
    request = a_request(geometry, 64)
    context.tables["request"] = ([0, 0, *context.pool.take(2)],)
    sources = choose_sources(EAGER, request, RequestProgress("request", 64), context)

    assert [source.label.tokens.start for source in sources] == [32, 48]


def test_a_state_is_stored_from_the_block_that_was_offered() -> None:
    geometry = a_geometry(a_layout(full_group(16), recurrent_group(32)), 32, 32)
    context = PoolContext()
    request = a_request(geometry, 64)
    context.tables["request"] = (context.pool.take(4), [0, *context.pool.take(1)])
    offered = OfferedState(GroupId(1), 42, 64)
    progress = RequestProgress("request", 64, (offered,))
    sources = choose_sources(EAGER, request, progress, context)
    states = [source for source in sources if source.ref.group_id == 1]

    assert [(s.rows, s.blocks, s.label.tokens.stop) for s in states] == [((42,), (42,), 64)]


class TestStoreJobs:
    @pytest.fixture
    def context(self) -> PoolContext:
        return PoolContext()

    def test_blocks_are_held_until_every_rank_has_copied(self, context: PoolContext) -> None:
        host = a_host()
        jobs = StoreJobs(host, context, itertools.count(1).__next__)
        request = a_request(GEOMETRY, 64)
        blocks = context.pool.take(4)
        context.tables["request"] = (blocks,)
        progress = RequestProgress("request", 64)
        started = jobs.start(choose_sources(EAGER, request, progress, context), request.ledger)
        context.pool.release(blocks)  # the request lost them

        assert started.job is not None
        assert jobs.num_held_blocks == 4
        assert context.pool.num_free == 99 - 4
        assert request.ledger.num_in_flight == 2
        settled = jobs.end(CopyReport(started.job.job_id, frozenset(), 0, 0.0))
        assert settled is not None
        assert len(settled.stored) == 2
        assert context.pool.num_free == 99
        assert len(host.ready_keys()) == 2
        assert jobs.end(CopyReport(started.job.job_id, frozenset(), 0, 0.0)) is None, "late"

    def test_what_failed_may_be_tried_again(self, context: PoolContext) -> None:
        host = a_host()
        jobs = StoreJobs(host, context, itertools.count(1).__next__)
        request = a_request(GEOMETRY, 64)
        context.tables["request"] = (context.pool.take(4),)
        progress = RequestProgress("request", 64)
        for progress_after in (ChunkProgress.OPEN, ChunkProgress.GIVEN_UP):
            sources = choose_sources(EAGER, request, progress, context)
            started = jobs.start(sources, request.ledger)
            assert started.job is not None
            bad = started.job.chunks[0].key
            jobs.end(CopyReport(started.job.job_id, frozenset({bad}), 0, 0.0))
            assert request.ledger.progress(ChunkRef(GroupId(0), 0)) is progress_after

        assert choose_sources(EAGER, request, progress, context) == []
        host.check_invariants()

    def test_what_is_there_or_on_its_way_is_not_copied_again(self, context: PoolContext) -> None:
        jobs = StoreJobs(a_host(), context, itertools.count(1).__next__)
        context.tables["one"] = context.tables["two"] = (context.pool.take(4),)
        for name, is_new in (("one", True), ("two", False)):
            request = a_request(GEOMETRY, 64, name=name)
            progress = RequestProgress(name, 64)
            started = jobs.start(choose_sources(EAGER, request, progress, context), request.ledger)
            assert (started.job is not None) is is_new
            assert request.ledger.is_taken(ChunkRef(GroupId(0), 1))

    def test_without_room_a_chunk_stays_open(self, context: PoolContext) -> None:
        jobs = StoreJobs(a_host(num_pages=1), context, itertools.count(1).__next__)
        request = a_request(GEOMETRY, 64)
        context.tables["request"] = (context.pool.take(4),)
        progress = RequestProgress("request", 64)
        started = jobs.start(choose_sources(EAGER, request, progress, context), request.ledger)

        assert started.num_refused == 1
        assert jobs.num_held_blocks == 2
        assert request.ledger.progress(ChunkRef(GroupId(0), 1)) is ChunkProgress.OPEN

    def test_after_a_reset_nothing_under_way_counts(self, context: PoolContext) -> None:
        host = a_host()
        jobs = StoreJobs(host, context, itertools.count(1).__next__)
        request = a_request(GEOMETRY, 64)
        context.tables["request"] = (context.pool.take(4),)
        progress = RequestProgress("request", 64)
        started = jobs.start(choose_sources(EAGER, request, progress, context), request.ledger)
        assert started.job is not None
        jobs.void()
        settled = jobs.end(CopyReport(started.job.job_id, frozenset(), 0, 0.0))

        assert settled is not None
        assert (len(settled.stored), len(settled.failed)) == (0, 2)
        assert len(host) == 0
