"""Everything that is counted, announced or explained, told in one place.

The scheduler half says what happened; this turns it into metrics, events and explanations, and
decides nothing.

Ownership: scheduler thread only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstrata.hierarchy.task_queue import Verb
from kvstrata.runtime.chunk_history import ChunkHistory
from kvstrata.runtime.explanations import Explanations
from kvstrata.telemetry import metrics
from kvstrata.telemetry.event_tracker import HOST
from kvstrata.telemetry.metrics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.hierarchy.changes import Changes
    from kvstrata.planning.load_plan import LoadPlan
    from kvstrata.planning.request_ledger import ChunkRef
    from kvstrata.runtime.load_jobs import Load
    from kvstrata.runtime.tracked_request import TrackedRequest
    from kvstrata.telemetry.event_tracker import EventsTracker
    from kvstrata.transfers.copy_queue import CopyReport

_log = logging.getLogger(__name__)


class Recorder:
    """Counters, events and explanations of one scheduler half.

    Args:
        tracker: announces chunks.
        tier_names: the lower tiers.
        tiers_with: the lower tiers known to have a chunk.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tracker: EventsTracker,
        tier_names: Sequence[str],
        tiers_with: Callable[[ChunkKey], tuple[str, ...]],
        clock: Callable[[], float],
    ) -> None:
        self.counters = Counters()
        self.tracker = tracker
        self._tier_names = tuple(tier_names)
        self._history = ChunkHistory(clock, tier_names)
        self.explanations = Explanations(self._history)
        self._tiers_with = tiers_with
        self._origins: dict[ChunkKey, str] = {}
        """Where chunks in host memory came from, until they are first loaded."""

    def admitted(self, request: TrackedRequest, external_tokens: int) -> None:
        """A request was given blocks; one with a load is counted when the load is done."""
        if external_tokens:
            self.explanations.keep(request)
        else:
            self._count(request, request.plan, {})

    def described(self, request: TrackedRequest, refs: Iterable[ChunkRef]) -> None:
        """Chunks of a request are stored or loaded: what they announce is known while it lives."""
        for group_id, chunk in refs if self.tracker.is_on else ():
            self.tracker.describe(
                request.grid, group_id, chunk, tokens=request.new.tokens, lora=request.new.lora
            )

    def loaded(self, load: Load, report: CopyReport) -> None:
        """A load has been copied by every rank."""
        if report.failed:
            self.counters.add(metrics.LOADS_FAILED, 1)
            return
        sources = load.tokens_by_source(self._take_origin)
        self._count(load.request, load.plan, sources)
        self.counters.add(metrics.LOAD_SECONDS, report.seconds)
        for group_id, num_bytes in load.bytes_by_group().items():
            self.counters.add(metrics.LOAD_BYTES, num_bytes, group_id)

    def refused(self, num_chunks: int) -> None:
        """Chunks found no room."""
        self.counters.add(metrics.STORES_REFUSED, num_chunks)

    def stored(self, labels: Sequence[ChunkLabel], report: CopyReport) -> None:
        """Chunks are in host memory, on every rank."""
        self.counters.add(metrics.STORE_SECONDS, report.seconds)
        for label in labels:
            self.counters.add(metrics.STORE_BYTES, label.payload_bytes, label.group_id)
        for label in labels if self.tracker.is_on else ():
            self.tracker.stored(label.key, HOST)

    def evicted(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks left host memory to make room."""
        self.counters.add(metrics.EVICTIONS, len(keys), HOST)
        self.left_host(keys)

    def evicted_below(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """Chunks left a lower tier to make room."""
        self.counters.add(metrics.EVICTIONS, len(keys), tier)
        for key in keys:
            self.tracker.removed(key, tier)

    def left_host(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks left host memory."""
        self._history.left(keys, self._tiers_with)
        for key in keys:
            self.tracker.removed(key, HOST)
            self._origins.pop(key, None)

    def out_of_reach(self) -> None:
        """Nothing that is in the tiers below now will be offered again."""
        for tier in self._tier_names:
            for key in self.tracker.residencies(tier):
                self.tracker.removed(key, tier)

    def tiers_changed(self, changes: Changes) -> None:
        """What the tiers below have reported."""
        if changes.evicted:
            self.evicted(changes.evicted)
        for tier, key in changes.arrived:
            self._origins[key] = tier
            self.tracker.stored(key, HOST)
        for tier, key in (*changes.written, *changes.found):
            self.tracker.stored(key, tier)
        for tier, key in changes.gone:
            self.tracker.removed(key, tier)
        for move in changes.moved:
            is_read = move.verb is Verb.READ
            num_bytes = metrics.READ_BYTES if is_read else metrics.WRITE_BYTES
            seconds = metrics.READ_SECONDS if is_read else metrics.WRITE_SECONDS
            self.counters.add(num_bytes, move.num_bytes, move.tier)
            self.counters.add(seconds, move.seconds, move.tier)
        for fault in changes.faults:
            kind = type(fault.error).__name__
            is_first = not self.counters.value(metrics.TIER_FAULTS, fault.tier, kind)
            self.counters.add(metrics.TIER_FAULTS, 1, fault.tier, kind)
            _log.log(logging.WARNING if is_first else logging.DEBUG, "%s", fault.error)

    def origin_of(self, key: ChunkKey) -> str:
        """The tier that a chunk in host memory came from, if it was not loaded since."""
        return self._origins.get(key, HOST)

    def _count(
        self, request: TrackedRequest, plan: LoadPlan | None, loaded: Mapping[str, int]
    ) -> None:
        """A request has what it was promised; its tokens count when it has so for the first time.

        One that was robbed of its blocks starts again, perhaps from another hit.
        """
        if not request.life.is_counted:
            request.life.is_counted = True
            self._count_tokens(len(request.new.tokens), plan, loaded)
        if request.verdict is not None and request.verdict.ran_out_of_time:
            self.counters.add(metrics.DEADLINE_MISSES, 1)
        self.explanations.keep(request)

    def _count_tokens(
        self, num_tokens: int, plan: LoadPlan | None, loaded: Mapping[str, int]
    ) -> None:
        """A request's tokens come from the device, a load, or computing, each once."""
        local = 0 if plan is None else plan.local_tokens
        computed = max(0, num_tokens - local - sum(loaded.values()))
        count = self.counters.add
        count(metrics.LOOKUPS, 1)
        count(metrics.LOOKUP_TOKENS, num_tokens)
        count(metrics.MISS_TOKENS, computed)
        count(metrics.PROMPT_TOKENS, local, "local")
        count(metrics.PROMPT_TOKENS, computed, "computed")
        for source, tokens in loaded.items():
            count(metrics.HIT_TOKENS, tokens, source)
            count(metrics.PROMPT_TOKENS, tokens, source)
        for obstacle in () if plan is None else plan.obstacles[-1:]:
            count(metrics.OBSTACLES, 1, obstacle.group_id)

    def _take_origin(self, key: ChunkKey) -> str:
        return self._origins.pop(key, HOST)
