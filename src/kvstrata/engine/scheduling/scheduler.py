"""Who runs in the next step.

    waiting --admit--> running --last token--> ended
       |  ^               |
       |  +---preempt-----+          a request that loses its blocks starts again
       +--match--> loading --report--> running, or waiting again if the load failed

A step has a budget of tokens. Running requests come first, oldest first; when blocks run out, the
youngest loses its own. Then waiting requests are admitted, in their order. The oldest never loses
its blocks: if loads or the connector hold what it needs, it waits and nobody is admitted before it.
So some request always ends.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind
from kvstrata.engine.scheduling.chunking import next_stop, state_stride, state_unit
from kvstrata.engine.scheduling.context import EngineContext
from kvstrata.engine.scheduling.request import FinishReason, Request, RequestState
from kvstrata.engine.scheduling.request_blocks import RequestBlocks
from kvstrata.engine.scheduling.step import ScheduledSequence, StepPlan
from kvstrata.errors import LayoutError, RequestError
from kvstrata.runtime.seam import NewRequest, RequestProgress, StepProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.cache.prefix_cache import LocalHit
    from kvstrata.engine.scheduling.step import StepResult
    from kvstrata.runtime.seam import EndedLoads, OfferedState, SchedulerConnector

MOST_FAILED_LOADS: Final = 3
"""After so many failed loads a request computes its tokens itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What a user may choose about scheduling."""

    max_step_tokens: int = 512
    """Tokens computed in one step."""
    max_running: int = 64
    """Requests that hold blocks at the same time."""
    max_request_tokens: int = 4096
    """Prompt and answer of one request."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way: what the ranks were asked, and whom it concerns."""

    plan: StepPlan
    requests: Sequence[Request]
    """In the order of the plan's sequences."""


class Scheduler:
    """Requests, their blocks, and the next step.

    Args:
        layout: the model's groups.
        num_blocks: size of the pool, the null block included.
        settings: the user's choices.
        connector: loads and stores blocks, if there is one.

    Raises:
        LayoutError: the layout is not one of this engine's, or the pool is empty.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        settings: SchedulerSettings | None = None,
        connector: SchedulerConnector | None = None,
    ) -> None:
        _check_layout(layout)
        self.settings = settings or SchedulerSettings()
        self.blocks = RequestBlocks(layout, num_blocks)
        self.requests: dict[str, Request] = {}
        self._layout = layout
        self._stride = state_stride(layout)
        self._state_unit = state_unit(layout)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._preempted: list[str] = []
        self._connector = connector
        if connector:
            connector.bind_scheduler_context(
                EngineContext(
                    self.blocks, self.requests, lambda: [r.request_id for r in self._waiting]
                )
            )

    @property
    def has_work(self) -> bool:
        """Whether another step is needed: a request lives, a load is under way, or more."""
        pending = self._connector is not None and self._connector.has_pending_work
        return bool(self.requests or self._loading or pending)

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: it cannot be served, whatever else runs.
        """
        self._check(request)
        self.requests[request.request_id] = request
        self._waiting.append(request)
        if self._connector:
            self._connector.add_request(
                NewRequest(
                    request.request_id,
                    request.hashes,
                    request.tokens,
                    request.num_prompt_tokens,
                    limits=request.limits,
                )
            )

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None: there is no such request."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORTED)
        return request

    def reset_cache(self) -> bool:
        """Forget every prefix; running requests go on. False: the connector could not."""
        self.blocks.pool.forget_all()
        return self._connector is None or self._connector.reset()

    def schedule(self) -> Step:
        """Plan the next step; it must be computed and handed to `update` before the next call."""
        budget = self.settings.max_step_tokens
        chosen: list[tuple[Request, int]] = []
        self._preempted = []
        budget = self._schedule_running(budget, chosen)
        if not self._preempted:
            self._schedule_waiting(budget, chosen)
        message = self._connector_message(chosen)
        sequences = [_sequence(request, stop) for request, stop in chosen]
        return Step(StepPlan(sequences, message), [request for request, _ in chosen])

    def update(self, step: Step, results: Sequence[StepResult]) -> list[Request]:
        """Take over what the ranks computed; returns the requests that got a token or ended."""
        tokens = results[0].tokens
        changed = []
        for request, sequence in zip(step.requests, step.plan.sequences, strict=True):
            if request.state is not RequestState.RUNNING:  # aborted meanwhile
                continue
            self.blocks.advance(request, sequence.stop)
            if sequence.sampling is not None:
                request.append(tokens[request.request_id])
                changed.append(request)
                if request.finish_reason:
                    self._end(request, request.finish_reason)
        if self._connector:
            reports = [result.connector_report or b"" for result in results]
            ended = self._connector.report(reports)
            if ended.done or ended.failed:
                self._settle(ended)
        return changed

    def check_invariants(self) -> None:
        """What is true between two steps."""
        self.blocks.pool.check_invariants()
        for request in self._waiting:
            assert request.state is RequestState.WAITING, request.request_id
            assert not request.tables, request.request_id
        for request in self._running:
            assert request.state is RequestState.RUNNING, request.request_id
        assert len(self._running) + len(self._loading) <= self.settings.max_running

    def _schedule_running(self, budget: int, chosen: list[tuple[Request, int]]) -> int:
        """Running requests take their share of the budget; returns what is left of it."""
        index = 0
        while index < len(self._running) and budget:
            request = self._running[index]
            stop = next_stop(request.computed, len(request.tokens), budget, self._stride)
            if not self._find_room(request, stop):
                return 0  # what becomes free is for those that run
            chosen.append((request, stop))
            budget -= stop - request.computed
            index += 1
        return budget

    def _find_room(self, request: Request, stop: int) -> bool:
        """Extend a request's blocks, at the cost of younger ones; False: it cannot run now.

        The youngest loses its own blocks then. The oldest keeps them: two requests that give way
        to each other's loads would never end.
        """
        while not self.blocks.extend(request, stop):
            youngest = self._running[-1]
            if youngest is self._running[0]:
                return False
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _schedule_waiting(self, budget: int, chosen: list[tuple[Request, int]]) -> None:
        """Admit waiting requests in their order, until budget, places or blocks run out."""
        for request in list(self._waiting):
            if not budget or len(self._running) + len(self._loading) >= self.settings.max_running:
                return
            hit = self.blocks.local_hit(request)
            external = self._match(request, hit)
            if external is None:
                continue
            if external:
                is_admitted = self._start_load(request, hit, external)
            else:
                stop = next_stop(hit.num_tokens, len(request.tokens), budget, self._stride)
                is_admitted = self._start(request, hit, stop)
                if is_admitted:
                    chosen.append((request, stop))
                    budget -= stop - hit.num_tokens
            if not is_admitted:
                return

    def _match(self, request: Request, hit: LocalHit) -> int | None:
        """Tokens that the connector would load behind a local hit; None: it does not know yet."""
        if self._connector is None or request.num_failed_loads >= MOST_FAILED_LOADS:
            return 0
        match = self._connector.match(request.request_id, hit.num_tokens)
        if match is None:
            return None
        length = hit.num_tokens + match.external_tokens
        can_go_on = length < len(request.tokens) and length % (self._stride or 1) == 0
        return match.external_tokens if can_go_on else 0

    def _start(self, request: Request, hit: LocalHit, stop: int) -> bool:
        if not self.blocks.admit(request, hit, stop, is_loaded=False):
            return False
        self._waiting.remove(request)
        self._running.append(request)
        request.state = RequestState.RUNNING
        request.local_hit_tokens, request.external_hit_tokens = hit.num_tokens, 0
        self._tell_allocated(request, 0)
        return True

    def _start_load(self, request: Request, hit: LocalHit, external: int) -> bool:
        loaded = hit.num_tokens + external
        if not self.blocks.admit(request, hit, loaded, is_loaded=True):
            return False
        self._waiting.remove(request)
        self._loading[request.request_id] = request
        request.state, request.loaded = RequestState.LOADING, loaded
        request.local_hit_tokens, request.external_hit_tokens = hit.num_tokens, external
        self._tell_allocated(request, external)
        return True

    def _tell_allocated(self, request: Request, external: int) -> None:
        if self._connector:
            tables = tuple(tuple(table.blocks) for table in request.tables)
            self._connector.allocated(request.request_id, tables, external)

    def _settle(self, ended: EndedLoads) -> None:
        for request in self._take_loading(ended.done):
            self.blocks.advance(request, request.loaded)
            request.state = RequestState.RUNNING
            self._running.append(request)
        for request in reversed(self._take_loading(ended.failed)):  # the oldest ends up in front
            request.num_failed_loads += 1
            request.external_hit_tokens = 0
            self._wait_again(request)

    def _take_loading(self, request_ids: frozenset[str]) -> list[Request]:
        """Requests whose loads have ended, oldest first; aborted ones lose their blocks instead."""
        ended = [r for r in self._loading.values() if r.request_id in request_ids]
        assert len(ended) == len(request_ids), f"not all are loading: {sorted(request_ids)}"
        for request in ended:
            del self._loading[request.request_id]
            if request.state is RequestState.ENDED:
                self.blocks.release(request)
        return [request for request in ended if request.state is not RequestState.ENDED]

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._preempted.append(request.request_id)
        request.num_preemptions += 1
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        self.blocks.release(request)
        request.state = RequestState.WAITING
        self._waiting.appendleft(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if self._connector:
            self._connector.finished(request.request_id)
        del self.requests[request.request_id]
        was, request.state = request.state, RequestState.ENDED
        if was is RequestState.LOADING:
            return  # its blocks are being written to: they are freed when the load is reported
        if was is RequestState.RUNNING:
            self._running.remove(request)
            self.blocks.release(request)
        else:
            self._waiting.remove(request)

    def _connector_message(self, chosen: Iterable[tuple[Request, int]]) -> bytes | None:
        if self._connector is None:
            return None
        running = [
            RequestProgress(request.request_id, stop, self._offered_states(request, stop))
            for request, stop in chosen
        ]
        return self._connector.plan_step(StepProgress(running, self._preempted))

    def _offered_states(self, request: Request, stop: int) -> tuple[OfferedState, ...]:
        """Most steps end where no group keeps a state."""
        if self._state_unit is None or stop % self._state_unit:
            return ()
        return self.blocks.offered_states(request, stop)

    def _check(self, request: Request) -> None:
        """Refuse what could never run."""
        if problem := self._problem(request):
            raise RequestError(f"request {request.request_id!r}: {problem}")

    def _problem(self, request: Request) -> str | None:
        prompt, wanted = len(request.tokens), request.sampling.max_tokens
        longest = self.settings.max_request_tokens
        needed = self.blocks.most_needed(prompt + wanted)
        there = self.blocks.pool.num_blocks - 1
        if request.request_id in self.requests or request.request_id in self._loading:
            return "this id is in use; take another"
        if not prompt:
            return "it has no tokens; a prompt needs at least one"
        if wanted < 1:
            return f"max_tokens is {wanted}, but must be at least 1"
        if prompt + wanted > longest:
            return (
                f"{prompt} prompt tokens and {wanted} for the answer, but max_request_tokens is "
                f"{longest}: shorten it, or raise that"
            )
        if needed > there:
            return (
                f"{prompt + wanted} tokens may need {needed} blocks, but the pool has {there}: "
                f"raise num_blocks to {needed + 1}, or shorten it"
            )
        return None


def _sequence(request: Request, stop: int) -> ScheduledSequence:
    is_last = stop == len(request.tokens)
    return ScheduledSequence(
        request.request_id,
        request.computed,
        request.tokens[request.computed : stop],
        tuple(table.blocks for table in request.tables),
        request.sampling if is_last else None,
    )


def _check_layout(layout: KVLayout) -> None:
    for index, group in enumerate(layout.groups):
        if group.kind is GroupKind.RECURRENT and group.boundary_tokens != group.block_tokens:
            raise LayoutError(
                f"recurrent group {index}: state_tokens is {group.state_tokens}, but this engine "
                f"keeps states at ends of blocks ({group.block_tokens}) alone"
            )
