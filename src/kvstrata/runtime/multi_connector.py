"""Several connectors as one, for any engine.

    match       every child is asked; the highest external_tokens * load_weight wins
    allocated   the winner loads; the others hear of the blocks and may store them later
    each step   the children's messages travel as one, by name; every child stores
    report      a load ends when its winner says so, or when its winner was stopped on every rank

A child that does not know yet delays a request until its own deadline at most, and only while it
could still win. A child that raises is stopped (see `multi_child`); the engine never notices.

Ownership: scheduler thread only. Never blocks, as far as the children do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstrata.core.layout import GroupKind
from kvstrata.errors import ConfigError
from kvstrata.runtime.match_rounds import MatchRounds
from kvstrata.runtime.multi_child import Child, ChildState, ChildStats, GuardedChild
from kvstrata.runtime.multi_loads import Load, MultiLoads
from kvstrata.runtime.multi_messages import MultiMessage, MultiReport
from kvstrata.runtime.multi_worker import MultiWorker, check_names
from kvstrata.runtime.preemption import preempted_ids
from kvstrata.runtime.seam import EndedLoads
from kvstrata.telemetry import metrics
from kvstrata.telemetry.metrics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.seam import (
        BlockTables,
        Match,
        NewRequest,
        SchedulerConnector,
        SchedulerContext,
        StepProgress,
    )
    from kvstrata.telemetry.metrics import Sample

__all__ = ["Child", "ChildStats", "MultiScheduler", "MultiWorker", "preempted_ids"]


class MultiScheduler:
    """The scheduler halves of several connectors as one.

    Args:
        children: the connectors; the first wins among equals.
        layout: the model's groups.
        clock: monotonic seconds.
        load_deadline_s: a child that has not reported a load by then is stopped. Children keep
            shorter deadlines of their own; this one is for those that forget.

    Raises:
        ConfigError: no children, two of one name, or one that cannot keep the layout's groups.
    """

    def __init__(
        self,
        children: Sequence[Child],
        layout: KVLayout,
        clock: Callable[[], float],
        *,
        load_deadline_s: float = 300.0,
    ) -> None:
        check_names([child.name for child in children])
        _check_groups(children, layout)
        self._children = [GuardedChild(child) for child in children]
        self._rounds = MatchRounds(self._children, layout.hit_stride_tokens, clock)
        self._loads = MultiLoads()
        self._clock = clock
        self._load_deadline_s = load_deadline_s
        self._context: SchedulerContext | None = None

    @property
    def has_pending_work(self) -> bool:
        """Whether a child has work, a load is under way, or a child is being stopped."""
        if self._loads or any(c.state is ChildState.STOPPING for c in self._children):
            return True
        return any(
            child.ask("has_pending_work", lambda c: bool(c.has_pending_work), otherwise=False)
            for child in self._children
        )

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Show every child the engine's blocks."""
        self._context = context
        for child in self._children:
            child.bind(context)

    def add_request(self, request: NewRequest) -> None:
        """Tell every child of a request."""
        self._rounds.add(request)
        for child in self._children:
            child.tell("add_request", lambda c: c.add_request(request), None)

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """What the best child can load; None: a child that may be better does not know yet."""
        return self._rounds.match(request_id, local_tokens)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The winner loads; the others are told of the blocks alone."""
        place = self._rounds.take_winner(request_id)
        winner = None if place is None else self._children[place]
        if external_tokens:
            load = Load(winner, external_tokens, tables, self._clock())
            self._loads.start(request_id, load)
        for child in self._children:
            tokens = external_tokens if child is winner else 0
            _tell_allocated(child, request_id, tables, tokens)

    def plan_step(self, progress: StepProgress) -> bytes:
        """Every child's message; a child that raises has none and is stopped with this one."""
        self._stop_late()
        parts = {
            child.name: part
            for child in self._children
            if (part := child.tell("plan_step", lambda c: _plan(c, progress), None)) is not None
        }
        stopping = [c.name for c in self._children if c.state is ChildState.STOPPING]
        return msgspec.msgpack.encode(MultiMessage(parts, stopping))

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """The loads whose winners say that they ended, and those whose winners were stopped."""
        if not reports:
            return EndedLoads()
        said = [_decode(raw) for raw in reports]
        self._take_faults(said)
        done: set[str] = set()
        failed: set[str] = set()
        for child in self._children:
            ended = _child_report(child, said)
            failed |= self._loads.end_failed(child, ended.failed)
            done |= self._loads.end_done(child, ended.done - ended.failed)
        self._settle_stopped(said)
        failed |= self._take_lost()
        return EndedLoads(frozenset(done), frozenset(failed))

    def finished(self, request_id: str) -> None:
        """Forget a request; a load under way is still reported."""
        self._rounds.forget(request_id)
        for child in self._children:
            child.tell("finished", lambda c: c.finished(request_id), None)

    def reset(self) -> bool:
        """Every child forgets what it stored; False: one that is in use could not."""
        answers = [
            child.ask("reset", lambda c: bool(c.reset()), otherwise=not child.is_active)
            for child in self._children
        ]
        return all(answers)

    def take_events(self) -> Sequence[object]:
        """What has happened in every child, child by child."""
        return [
            event
            for child in self._children
            for event in child.ask("take_events", lambda c: list(c.take_events()), ())
        ]

    def close(self) -> None:
        """Close every child."""
        for child in self._children:
            child.close()

    def samples(self) -> list[Sample]:
        """The children's counts, as metrics."""
        counters = Counters()
        for name, stats in self.stats().items():
            counters.set(metrics.CHILD_QUERIES, stats.queries, name)
            counters.set(metrics.CHILD_HITS, stats.hits, name)
            counters.set(metrics.CHILD_HIT_TOKENS, stats.hit_tokens, name)
            counters.set(metrics.CHILD_MISSES, stats.misses, name)
            counters.set(metrics.CHILD_PENDING, stats.pending_loads, name)
        return counters.snapshot()

    def stats(self) -> dict[str, ChildStats]:
        """What every child has done, by name. Changes nothing."""
        pending = self._loads.pending(self._children)
        return {c.name: c.stats(n) for c, n in zip(self._children, pending, strict=True)}

    def check_invariants(self) -> None:
        """What is true between two calls."""
        self._rounds.check_invariants()
        for name, stats in self.stats().items():
            assert stats.queries == stats.hits + stats.misses + stats.undecided, name
            assert stats.loads >= stats.failed_loads + stats.pending_loads, name

    def _stop_late(self) -> None:
        """Stop children that owe a report for too long."""
        if not self._loads:
            return
        for child in self._loads.late(self._clock() - self._load_deadline_s):
            child.add_fault("load", "it was not reported in time")
            child.stop()

    def _take_faults(self, said: Sequence[MultiReport]) -> None:
        """A child that raised on any rank is stopped on all."""
        for child in self._children:
            for fault in [rank.faults[child.name] for rank in said if child.name in rank.faults]:
                child.add_fault("worker half", fault)
                child.stop()

    def _settle_stopped(self, said: Sequence[MultiReport]) -> None:
        """Children that every rank has stopped are settled."""
        for child in self._children:
            is_everywhere = all(child.name in rank.stopped for rank in said)
            if child.state is ChildState.STOPPING and is_everywhere:
                child.settle(is_unclean=any(child.name in rank.unclean for rank in said))

    def _take_lost(self) -> set[str]:
        """End the loads that nobody will report."""
        lost = self._loads.take_lost()
        for load in lost.values():
            if load.is_unsafe:
                self._withdraw(load.tables)
        return set(lost)

    def _withdraw(self, tables: BlockTables) -> None:
        """Hold blocks for ever that a rank may still write to: better lost than wrong."""
        context = self._context
        assert context is not None  # bound before the first request
        blocks = sorted({block_id for table in tables for block_id in table})
        context.touch([b for b in blocks if not context.get_block(b).is_null])


def _check_groups(children: Sequence[Child], layout: KVLayout) -> None:
    kinds = [group.kind for group in layout.groups]
    unable = [child.name for child in children if not child.supports_hybrid_groups]
    if unable and kinds != [GroupKind.FULL]:
        raise ConfigError(
            "connectors",
            f"{', '.join(unable)} cannot keep hybrid groups, but the model's groups are "
            f"{', '.join(kinds)}",
            "connectors that support hybrid groups",
        )


def _decode(report: bytes) -> MultiReport:
    """What a rank said; an empty report says nothing."""
    return msgspec.msgpack.decode(report, type=MultiReport) if report else MultiReport()


def _tell_allocated(
    child: GuardedChild, request_id: str, tables: BlockTables, external_tokens: int
) -> None:
    child.tell("allocated", lambda c: c.allocated(request_id, tables, external_tokens), None)


def _plan(connector: SchedulerConnector, progress: StepProgress) -> bytes:
    return bytes(connector.plan_step(progress))


def _child_report(child: GuardedChild, said: Sequence[MultiReport]) -> EndedLoads:
    """What a child makes of its ranks' reports; nothing unless all of them have one."""
    parts = [rank.parts[child.name] for rank in said if child.name in rank.parts]
    if len(parts) < len(said):
        return EndedLoads()
    return child.tell("report", lambda c: _ended(c, parts), EndedLoads())


def _ended(connector: SchedulerConnector, parts: Sequence[bytes]) -> EndedLoads:
    ended = connector.report(parts)
    return EndedLoads(frozenset(ended.done), frozenset(ended.failed))
