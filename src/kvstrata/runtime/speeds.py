"""How fast this engine computes and this machine copies, measured as it goes.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.planning.cost import Speed, is_load_worth

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.planning.load_plan import LoadPlan
    from kvstrata.runtime.seam import StepProgress
    from kvstrata.runtime.tracked_request import TrackedRequest
    from kvstrata.transfers.copy_queue import CopyReport

_FEWEST_TOKENS: Final = 64
"""Steps with fewer tokens say little about prefill."""


class MeasuredSpeeds:
    """Compute speed from steps, copy speed from loads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._compute = Speed()
        self._copy = Speed()
        self._step_started = 0.0
        self._step_tokens = 0
        self._step_s = 0.0
        self._computed: dict[str, int] = {}

    def step_planned(self, progress: StepProgress) -> None:
        """A step with so many new tokens starts now."""
        before, self._computed = self._computed, {}
        self._step_tokens = 0
        for name, stop, _ in progress.running:
            self._computed[name] = stop
            self._step_tokens += stop - before.get(name, stop)
        self._step_started = self._clock()

    def step_reported(self) -> None:
        """The step has been computed."""
        seconds = self._clock() - self._step_started
        self._step_s = seconds
        if self._step_tokens >= _FEWEST_TOKENS:
            self._compute = self._compute.measured(self._step_tokens, seconds)

    def load_reported(self, report: CopyReport) -> None:
        """A load has been copied."""
        self._copy = self._copy.measured(report.num_bytes, report.seconds)

    def compute_s(self, num_tokens: int) -> float | None:
        """How long computing so many tokens would take; None: not known yet."""
        return self._compute.seconds(num_tokens)

    def is_worth(self, request: TrackedRequest, plan: LoadPlan) -> bool:
        """Whether a plan's load beats computing its tokens."""
        return is_load_worth(
            plan.external_tokens,
            sum(label.payload_bytes for label in request.labels(plan)),
            compute=self._compute,
            copy=self._copy,
            overhead_s=self._step_s,
        )
