"""The half beside the engine's scheduler: decides what is loaded and stored, and when.

    arrival    ask the tiers below about the request's chunks
    match      choose the longest hit; while more of it is on its way up, "ask again", until the
               request's deadline; then what is there
    allocated  lease the hit's chunks and send a load
    plan_step  choose stores, reserve room, hold their blocks, send; promote for waiting requests
    report     settle what every rank has reported, pass stores on to the tiers below

Nothing here blocks or touches bytes; nothing raises into the engine.

Ownership: scheduler thread only.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from kvstrata.config.schema import tier_name
from kvstrata.core.ids import ChunkKey
from kvstrata.core.lookups import ChunkLookup
from kvstrata.runtime.lazy_stores import LazyStores
from kvstrata.runtime.loading import Loading
from kvstrata.runtime.messages import NO_NEWS, NO_WORK, StepMessage, decode_report, encode
from kvstrata.runtime.rank_quorum import RankQuorum
from kvstrata.runtime.recorder import Recorder
from kvstrata.runtime.seam import EndedLoads, Match
from kvstrata.runtime.shield import shielded
from kvstrata.runtime.speeds import MeasuredSpeeds
from kvstrata.runtime.store_jobs import StoreJobs
from kvstrata.runtime.storing import choose_sources
from kvstrata.runtime.tracked_request import TrackedRequest
from kvstrata.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstrata.config.schema import Config
    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.hierarchy.tier_stack import TierStack
    from kvstrata.planning.request_ledger import RequestLedger
    from kvstrata.runtime.explanations import Explanation
    from kvstrata.runtime.message_channel import MessageChannel, Outbox
    from kvstrata.runtime.seam import (
        BlockTables,
        NewRequest,
        RequestProgress,
        SchedulerContext,
        StepProgress,
    )
    from kvstrata.runtime.store_jobs import StoreSource
    from kvstrata.telemetry.event_publisher import EventPublisher
    from kvstrata.telemetry.event_tracker import EventsTracker
    from kvstrata.telemetry.metrics import Sample
    from kvstrata.transfers.copy_queue import CopyJob, CopyReport

_log = logging.getLogger(__name__)

_GENERATION_BYTES: Final = 8
MOST_PREFETCHED: Final = 8
"""Waiting requests whose chunks are brought up before the engine asks."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the scheduler half reaches the ranks' tiers."""

    stack: TierStack
    outbox: Outbox
    channels: tuple[tuple[MessageChannel, ...], ...]
    """By tier and rank: where reports go."""
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Announcing:
    """What is said about chunks, and where."""

    tracker: EventsTracker
    publisher: EventPublisher | None = None
    """None: the engine takes the events and publishes them."""


_NONE_ENDED: Final = EndedLoads()


def _no_match() -> Match | None:
    return Match(0)


def _no_events() -> Sequence[object]:
    return ()


class SchedulerSide:
    """Decides. See the module's docstring for the order of calls.

    Args:
        config: the user's settings.
        geometry: the engine's chunks.
        wiring: the tiers, and the way to the ranks.
        announcing: what is said about chunks, and where.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        geometry: ChunkGeometry,
        wiring: Wiring,
        announcing: Announcing,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._wiring = wiring
        self._stack = wiring.stack
        self._has_tiers = bool(wiring.channels)
        """Whether there are tiers below; without them nothing is brought up or reported."""
        self._clock = clock
        self._requests: dict[str, TrackedRequest] = {}
        self._speeds = MeasuredSpeeds(clock)
        names = [tier_name(tier) for tier in config.tiers]
        self._recorder = Recorder(announcing.tracker, names, self._stack.tiers_with, clock)
        self._publisher = announcing.publisher
        self._loading = Loading(
            config.load, self._stack, clock, self._speeds, self._recorder.described
        )
        self._quorum = RankQuorum(wiring.num_ranks)
        self._job_ids = itertools.count(1)
        self._to_send: list[CopyJob] = []
        self._lost_loads: list[str] = []
        self._evicted: list[tuple[int, ChunkKey]] = []
        """What tiers let go of by themselves, by their position."""
        self._ended_loads = _NONE_ENDED
        self.hook_faults: Counter[str] = Counter()

    @property
    def has_pending_work(self) -> bool:
        """Whether copies, promotions, demotions or questions are under way."""
        under_way = len(self._quorum) + len(self._wiring.outbox) + self._stack.num_pending
        return bool(under_way or self._to_send)

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Keep the way to the engine's blocks."""
        self._context = context
        self._stores = StoreJobs(self._stack.host, context, self._next_job_id)
        self._lazy = LazyStores(context, self._geometry) if self._is_lazy else None

    @shielded(lambda: None)
    def add_request(self, request: NewRequest) -> None:
        """Start to find out what is known about its chunks."""
        tracked = TrackedRequest(request, self._geometry_for(request))
        self._requests[request.request_id] = tracked
        if self._has_tiers:
            self._loading.arrive(tracked)

    @shielded(_no_match)
    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """How much can be loaded behind the engine's own hit; None: ask again."""
        return self._loading.answer(self._requests[request_id], local_tokens)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """Start a load, or note that the request computes from its local hit on."""
        try:
            job = self._start(self._requests[request_id], tables, external_tokens)
        except Exception:  # noqa: BLE001 - the request would wait for ever
            self.hook_faults["allocated"] += 1
            _log.exception("kvstrata: a load could not be started; its tokens are computed")
            job = None
        if job is not None:
            self._quorum.expect(job.job_id)
            self._to_send.append(job)
        elif external_tokens:  # the request waits for a load that will not come
            self._lost_loads.append(request_id)
            self._load_ended(request_id, is_done=False)

    def plan_step(self, progress: StepProgress) -> bytes:
        """Choose stores, promote for waiting requests, and say what ranks shall do.

        Whatever fails here, what was promised to requests is sent.
        """
        self._follow(progress)
        if self._has_tiers:
            self._prefetch()
        if not (self._to_send or self._lost_loads or self._wiring.outbox):
            return NO_WORK
        copies, self._to_send = self._to_send, []
        lost, self._lost_loads = self._lost_loads, []
        return encode(StepMessage(self._wiring.outbox.take(), tuple(copies), tuple(lost)))

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """Settle what every rank has reported."""
        self._time_step()
        self._note_evicted()
        for rank, data in enumerate(reports):
            if data and data != NO_NEWS:
                self._take(rank, data)
        if self._has_tiers:
            self._poll()
        if self._publisher:
            self._publish(self._publisher)
        ended, self._ended_loads = self._ended_loads, _NONE_ENDED
        return ended

    @shielded(lambda: None)
    def finished(self, request_id: str) -> None:
        """Forget a request; what it has under way settles by itself."""
        ledger = self._requests.pop(request_id).ledger
        ledger.end()
        self._forget_if_settled(ledger)

    @shielded(lambda: False)
    def reset(self) -> bool:
        """Forget what is in host memory; the tiers below keep what they have."""
        self._stores.void()
        self._note_evicted()
        self._recorder.left_host(self._stack.host.clear())
        for request in self._requests.values():
            request.plan = None
        return True

    @shielded(lambda: False)
    def renew(self) -> bool:
        """The weights may have changed: nothing stored before is offered again, in any tier.

        Chunks have other keys from now on, which no other engine can come upon: what this one
        stores stays its own until it ends. What requests have computed before is not stored.
        """
        self.reset()
        self._recorder.out_of_reach()
        self._geometry = self._geometry.renewed(secrets.token_bytes(_GENERATION_BYTES))
        self._lazy = LazyStores(self._context, self._geometry) if self._is_lazy else None
        self._requests = {
            name: request.renewed(self._geometry_for(request.new))
            for name, request in self._requests.items()
        }
        return True

    @shielded(lambda: None)
    def distrust_stores(self) -> None:
        """What is not in host memory yet may not be what its keys say: it will not count."""
        self._stores.void()
        self._lazy = LazyStores(self._context, self._geometry) if self._is_lazy else None

    @shielded(lambda: None)
    def change_request(self, request: NewRequest) -> None:
        """Another adapter answers a request than it was announced with.

        It has other keys from now on, and what it has computed is not stored.
        """
        old = self._requests[request.request_id]
        changed = old.renewed(self._geometry_for(request))
        changed.new = request
        self._requests[request.request_id] = changed
        old.ledger.end()
        self._forget_if_settled(old.ledger)

    @shielded(lambda: None)
    def let_blocks_go(self) -> None:
        """The engine needs all its blocks: stores under way will not count."""
        self._stores.void()

    @shielded(lambda: None)
    def announce_again(self) -> None:
        """The engine's readers were told that nothing is cached: say again what is."""
        if self._publisher is None:
            self.tracker.announce_again()

    @shielded(_no_events)
    def take_events(self) -> Sequence[object]:
        """Hand over what has happened to chunks since the last call, if nobody publishes it."""
        return () if self._publisher else self.tracker.take_events()

    def stats(self) -> list[Sample]:
        """Every metric as it is now."""
        counters = self._recorder.counters
        for hook, count in self.hook_faults.items():
            counters.set(metrics.HOOK_FAULTS, count, hook)
        for tier, count in self._stack.num_dropped.items():
            counters.set(metrics.WRITES_DROPPED, count, tier)
        counters.set(metrics.PENDING, len(self._loading), "loads")
        counters.set(metrics.PENDING, len(self._stores), "stores")
        counters.set(metrics.PENDING, self._stack.num_pending, "tier jobs")
        counters.set(metrics.HOST_BYTES, self._stack.host.free_bytes, "free")
        counters.set(metrics.HOST_BYTES, self._config.host.capacity, "capacity")
        return counters.snapshot()

    @property
    def tracker(self) -> EventsTracker:
        """What announces chunks."""
        return self._recorder.tracker

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of the engine will come free without its doing."""
        return bool(self._stores.num_held_blocks)

    def hit_sources(self, request_id: str) -> Mapping[str, int]:
        """The tokens of a request's load under way, by the tier they came from."""
        load = self._loading.find(request_id)
        return {} if load is None else load.tokens_by_source(self._recorder.origin_of)

    @property
    def num_leases(self) -> int:
        """Holds on chunks in host memory, of loads and demotions under way."""
        return self._stack.host.num_leases

    def host_keys(self) -> frozenset[ChunkKey]:
        """The chunks that can be loaded from host memory now."""
        return self._stack.host.ready_keys()

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request's hit was as long as it was; kept for the last requests."""
        return self._recorder.explanations.of(request_id)

    def close(self) -> None:
        """Let go of the tiers. Does nothing on successive calls."""
        self._stack.close()
        if self._publisher:
            self._publisher.close()

    def check_invariants(self) -> None:
        """What is true between two steps."""
        self._stack.check_invariants()
        for request in self._requests.values():
            assert not request.ledger.has_ended, request.request_id

    def _geometry_for(self, request: NewRequest) -> ChunkGeometry:
        if not request.adapter_weights:
            return self._geometry
        return self._geometry.adapted(request.adapter_weights)

    @property
    def _is_lazy(self) -> bool:
        return self._config.store.mode == "lazy"

    def _next_job_id(self) -> int:
        return next(self._job_ids)

    def _start(
        self, request: TrackedRequest, tables: BlockTables, external_tokens: int
    ) -> CopyJob | None:
        if not request.is_admitted:  # engines may tell it again when a load has ended
            self._recorder.admitted(request, external_tokens)
            request.is_admitted = not external_tokens
        if not external_tokens:
            request.compute_from_local_hit()
            return None
        self._recorder.described(request, request.refs(request.plan))
        return self._loading.start(self._next_job_id(), request, tables, external_tokens)

    @shielded(lambda: None)
    def _follow(self, progress: StepProgress) -> None:
        """Take in what a step does, and store what it completes."""
        self._speeds.step_planned(progress)
        for request_id in progress.preempted:
            self._preempt(request_id)
        for running in progress.running:
            self._advance(running)
        if self._lazy:
            self._begin(self._lazy.about_to_leave(progress), None)

    @shielded(lambda: None)
    def _preempt(self, request_id: str) -> None:
        self._requests[request_id].preempt()

    @shielded(lambda: None)
    def _advance(self, running: RequestProgress) -> None:
        """Take in one request's progress; its faults are not the others'."""
        request = self._requests[running.request_id]
        if request.is_stale:
            return
        sources = choose_sources(self._config.store, request, running, self._context)
        if sources:
            self._store(request, sources)

    @shielded(lambda: None)
    def _prefetch(self) -> None:
        """Bring up what the next requests will want."""
        for request_id in self._context.waiting_requests()[:MOST_PREFETCHED]:
            if request_id in self._requests:
                self._loading.prefetch(self._requests[request_id])

    def _store(self, request: TrackedRequest, sources: Sequence[StoreSource]) -> None:
        """Store now, or remember for later."""
        self._recorder.described(request, [source.ref for source in sources])
        if self._lazy is None:
            self._begin(sources, request)
            return
        self._lazy.remember(request.grid, sources)
        refs = [source.ref for source in sources]
        request.ledger.begin(refs)
        request.ledger.settle(refs)

    def _begin(self, sources: Sequence[StoreSource], request: TrackedRequest | None) -> None:
        started = self._stores.start(sources, None if request is None else request.ledger)
        if started.evicted:
            self._recorder.evicted(started.evicted)
        if started.num_refused:
            self._recorder.refused(started.num_refused)
        if started.job is not None:
            self._quorum.expect(started.job.job_id)
            self._to_send.append(started.job)

    @shielded(lambda: None)
    def _time_step(self) -> None:
        self._speeds.step_reported()

    @shielded(lambda: None)
    def _note_evicted(self) -> None:
        """What promotions have driven out left before anything that a report brings."""
        self._recorder.evicted(self._stack.take_evicted())

    @shielded(lambda: None)
    def _take(self, rank: int, data: bytes) -> None:
        """Take in one rank's report."""
        report = decode_report(data)
        for tier, keys in enumerate(report.evicted):
            self._evicted.extend((tier, ChunkKey(key)) for key in keys)
        for tier_report in report.tier_reports:
            self._wiring.channels[tier_report.tier][rank].deliver(tier_report.read())
        for copy_report in report.copy_reports:
            outcome = self._quorum.count(rank, copy_report)
            if outcome is not None:
                self._copied(outcome)

    @shielded(lambda: None)
    def _copied(self, outcome: CopyReport) -> None:
        """Every rank has reported a job of copies."""
        if (load := self._loading.end(outcome)) is not None:
            # First: a request whose load is not reported waits for ever.
            self._load_ended(load.request.request_id, is_done=not outcome.failed)
            self._loading.settle(load, outcome)
            if not outcome.failed:  # a copy that failed says nothing about speed
                self._speeds.load_reported(outcome)
            self._recorder.loaded(load, outcome)
        elif (settled := self._stores.end(outcome)) is not None:
            self._recorder.stored(settled.stored, outcome)
            self._stack.demote(settled.stored)
            if settled.ledger is not None:
                self._forget_if_settled(settled.ledger)

    def _forget_if_settled(self, ledger: RequestLedger) -> None:
        """What an ended request's chunks announce is not needed once its stores have settled."""
        if self._lazy is not None or not self.tracker.is_on:
            return
        if not ledger.has_ended or ledger.num_in_flight:
            return
        keys = list(ledger.grid.all_keys())
        codes = self._stack.host.lookup(keys)
        self._recorder.tracker.forget(
            key
            for key, code in zip(keys, codes, strict=True)
            if code != ChunkLookup.ARRIVING and not self._stack.is_in_doubt(key)
        )

    def _load_ended(self, request_id: str, *, is_done: bool) -> None:
        ended = self._ended_loads
        add = ended.with_done if is_done else ended.with_failed
        self._ended_loads = add([request_id])

    @shielded(lambda: None)
    def _poll(self) -> None:
        """Take in what the tiers below have reported."""
        changes = self._stack.poll()
        self._recorder.tiers_changed(changes)
        self._take_evicted()
        if changes.lost:
            for request in self._requests.values():
                request.lose(changes.lost)

    @shielded(lambda: None)
    def _publish(self, publisher: EventPublisher) -> None:
        publisher.publish(self.tracker.take_events())

    def _take_evicted(self) -> None:
        """Tiers let go of chunks by themselves."""
        if not self._evicted:
            return
        evicted, self._evicted = self._evicted, []
        for tier, pairs in itertools.groupby(sorted(evicted), key=itemgetter(0)):
            keys = [key for _, key in pairs]
            self._recorder.evicted_below(self._stack.evicted_below(tier, keys), keys)
