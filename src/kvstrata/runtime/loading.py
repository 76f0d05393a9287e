"""From a request's chunks to an answer: how much can be loaded, now or in a while.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.lookups import ChunkLookup
from kvstrata.core.outcomes import Deadline
from kvstrata.runtime.load_jobs import LoadJobs
from kvstrata.runtime.seam import Match
from kvstrata.runtime.tracked_request import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.config.schema import LoadConfig
    from kvstrata.hierarchy.tier_stack import TierStack
    from kvstrata.planning.load_plan import LoadPlan
    from kvstrata.planning.request_ledger import ChunkRef
    from kvstrata.runtime.load_jobs import Load
    from kvstrata.runtime.speeds import MeasuredSpeeds
    from kvstrata.runtime.tracked_request import TrackedRequest
    from kvstrata.transfers.copy_queue import CopyJob, CopyReport

_TIERS_SHARE: Final = 0.9
"""Of a request's time; a tier reports what it has read at the end of its own."""
_TRY_EVERY: Final = 32
"""Of the loads that seem too slow, one in so many is done all the same."""
_CAN_ARRIVE: Final = (ChunkLookup.ARRIVING, ChunkLookup.UNKNOWN)


class Loading:
    """Chooses hits, brings their chunks up, and starts loads.

    Args:
        config: deadline and rule.
        stack: host memory and the tiers below.
        clock: monotonic seconds.
        speeds: what loading and computing cost.
        describe: told which chunks of a request are brought up, while the request lives.
    """

    def __init__(
        self,
        config: LoadConfig,
        stack: TierStack,
        clock: Callable[[], float],
        speeds: MeasuredSpeeds,
        describe: Callable[[TrackedRequest, Sequence[ChunkRef]], None],
    ) -> None:
        self._config = config
        self._stack = stack
        self._clock = clock
        self._speeds = speeds
        self._describe = describe
        self._jobs = LoadJobs(stack.host)
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def arrive(self, request: TrackedRequest) -> None:
        """Find out what the tiers below know about a new request's chunks."""
        self._stack.ask(list(request.grid.all_keys()), self._time_for_tiers(request))

    def prefetch(self, request: TrackedRequest) -> None:
        """Bring up what a waiting request will want, before the engine asks."""
        if request.is_fetched:
            return
        plan = request.choose(self._stack.lookup, 0)
        request.is_fetched = plan.awaited_tokens == plan.num_tokens
        if not request.is_fetched:
            self._fetch(request, 0)

    def answer(self, request: TrackedRequest, local_tokens: int) -> Match | None:
        """How much can be loaded behind the engine's own hit; None: ask again."""
        now = self._clock()
        if request.asked_at is None:
            request.asked_at = now
        request.plan = None  # an answer that fails leaves no old one behind
        plan = request.choose(self._stack.lookup, local_tokens)
        is_short = not request.awaited.isdisjoint(request.failed)
        ran_out_of_time = is_short and now >= self._time_for_tiers(request)
        if plan.awaited_tokens > plan.num_tokens:
            request.patience_s = self._patience_s(plan)
            ran_out_of_time = now >= self._deadline(request)
            if not ran_out_of_time:
                self._fetch(request, local_tokens)
                return None
        if not ran_out_of_time:
            plan = self._with_lasting_obstacles(request, plan)
        was_too_slow = bool(plan.loads) and not self._is_worth(request, plan)
        if was_too_slow:
            plan = plan._replace(num_tokens=local_tokens, loads=())
        request.plan = plan
        request.verdict = Verdict(now - request.asked_at, ran_out_of_time, was_too_slow)
        return Match(plan.external_tokens)

    def start(
        self,
        job_id: int,
        request: TrackedRequest,
        tables: Sequence[Sequence[int]],
        external_tokens: int,
    ) -> CopyJob | None:
        """Lease what was promised; None: it is not there any more, and the load has failed."""
        plan = request.plan
        if plan is None or plan.external_tokens != external_tokens:
            return None
        try:
            return self._jobs.start(job_id, request, plan, tables)
        except KeyError:
            return None

    def end(self, report: CopyReport) -> Load | None:
        """Let go of a load that every rank has reported; None: the job is none of these."""
        return self._jobs.end(report)

    def find(self, request_id: str) -> Load | None:
        """A request's load under way."""
        return self._jobs.find(request_id)

    def settle(self, load: Load, report: CopyReport) -> None:
        """Go on from what was loaded; what failed is not offered to its request again."""
        request = load.request
        request.is_admitted = not report.failed
        if report.failed:
            request.fail(report.failed)
            request.plan = None
        elif not request.ledger.has_ended:
            request.ledger.resume(load.plan)

    def _fetch(self, request: TrackedRequest, local_tokens: int) -> None:
        """Ask about and promote the chunks of the longest hit that can still arrive."""
        target = request.choose_awaited(self._stack.lookup, local_tokens)
        labels = request.labels(target)
        keys = [label.key for label in labels]
        deadline = self._time_for_tiers(request)
        request.awaited = set(keys)
        if self._clock() < deadline:
            self._describe(request, request.refs(target))
            self._stack.ask(keys, deadline)
            self._stack.promote(labels, deadline)
        ready = request.choose(self._stack.lookup, local_tokens)
        request.is_fetched = ready.awaited_tokens == ready.num_tokens

    def _with_lasting_obstacles(self, request: TrackedRequest, plan: LoadPlan) -> LoadPlan:
        """A chunk that a lower tier has is not what shortened a hit that nothing was awaited for.

        It was left there because another group lacks its own; that one is the reason.
        """
        if all(obstacle.lookup not in _CAN_ARRIVE for obstacle in plan.obstacles):
            return plan
        awaited = request.choose_awaited(self._stack.lookup, plan.local_tokens)
        return plan._replace(obstacles=awaited.obstacles)

    def _is_worth(self, request: TrackedRequest, plan: LoadPlan) -> bool:
        """Whether to load; now and then also what seems too slow, so that speeds stay measured."""
        if self._config.decide == "always" or self._speeds.is_worth(request, plan):
            return True
        self._num_refused = (self._num_refused + 1) % _TRY_EVERY
        return self._num_refused == 0

    def _patience_s(self, plan: LoadPlan) -> float:
        """How long to wait for more: not longer than computing it would take."""
        compute_s = self._speeds.compute_s(plan.awaited_tokens - plan.num_tokens)
        if self._config.decide == "always" or compute_s is None:
            return self._config.deadline
        return min(self._config.deadline, compute_s)

    def _deadline(self, request: TrackedRequest) -> Deadline:
        return self._after(request, 1.0)

    def _time_for_tiers(self, request: TrackedRequest) -> Deadline:
        """Tiers end earlier, so that what has arrived is known when the request's time is up."""
        return self._after(request, _TIERS_SHARE)

    def _after(self, request: TrackedRequest, share: float) -> Deadline:
        """When a share of the request's time has passed."""
        start = self._clock() if request.asked_at is None else request.asked_at
        wait_s = request.patience_s
        return Deadline(start + share * (self._config.deadline if wait_s is None else wait_s))
