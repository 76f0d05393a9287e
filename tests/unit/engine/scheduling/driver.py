"""A scheduler whose ranks draw token 1 whatever they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstrata.engine.scheduling.request import Request
from kvstrata.engine.scheduling.scheduler import Scheduler, SchedulerSettings
from kvstrata.engine.scheduling.step import SamplingParams, StepResult
from kvstrata.runtime.seam import EndedLoads, Match
from kvstrata.testing.memory_connector import Message, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.scheduling.scheduler import Step
    from kvstrata.runtime.seam import (
        BlockTables,
        NewRequest,
        SchedulerConnector,
        SchedulerContext,
        StepProgress,
    )

MOST_STEPS = 1000


def a_request(
    layout: KVLayout,
    prompt: int | Sequence[int] = 5,
    *,
    name: str = "r",
    max_tokens: int = 1,
    salt: str | None = None,
) -> Request:
    """A request for these tokens, or for this many."""
    tokens = range(prompt) if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), layout, salt)


class Driver:
    """Sends requests and runs steps.

    Args:
        layout: the groups.
        num_blocks: that can be taken; the null block comes on top.
        connector: if there is one.
        settings: of the scheduler.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int = 40,
        connector: SchedulerConnector | None = None,
        **settings: int,
    ) -> None:
        self.layout = layout
        self.scheduler = Scheduler(layout, num_blocks + 1, SchedulerSettings(**settings), connector)
        self.pool = self.scheduler.blocks.pool

    def send(self, name: str, prompt: int | Sequence[int] = 5, *, max_tokens: int = 1) -> Request:
        """A request that the scheduler has taken."""
        request = a_request(self.layout, prompt, name=name, max_tokens=max_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; where each of its sequences ended."""
        step = self.scheduler.schedule()
        self.compute(step)
        return {sequence.request_id: sequence.stop for sequence in step.plan.sequences}

    def compute(self, step: Step) -> list[Request]:
        """Compute a step and hand it to the scheduler; who got a token."""
        drawn = {s.request_id: 1 for s in step.plan.sequences if s.sampling}
        report = None
        if step.plan.connector_message is not None:
            message = msgspec.msgpack.decode(step.plan.connector_message, type=Message)
            report = msgspec.msgpack.encode(Report(message.stores, list(message.loads)))
        changed = self.scheduler.update(step, [StepResult(drawn, connector_report=report)])
        self.scheduler.check_invariants()
        return changed

    def finish(self) -> list[dict[str, int]]:
        """Step until nothing is left to do; what each step did."""
        steps: list[dict[str, int]] = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert len(steps) < MOST_STEPS, "no end"
        return steps

    def free(self) -> list[int]:
        """The free queue."""
        return [view.block_id for view in self.pool.walk_free()]


class ScriptedConnector:
    """Answers and ends loads as a test says, and keeps what it is told."""

    def __init__(self, **answers: int | None) -> None:
        self.answers = answers
        """Length of the prefix to load, by request; None: undecided; absent: nothing."""
        self.ended = EndedLoads()
        """What the next report says."""
        self.can_reset = True
        self.added: list[str] = []
        self.allocated_tokens: list[tuple[str, int]] = []
        self.finished_requests: list[str] = []
        self.progress: list[StepProgress] = []

    @property
    def has_pending_work(self) -> bool:
        """Never."""
        return False

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Keep it."""
        self.context = context

    def add_request(self, request: NewRequest) -> None:
        """Note it."""
        self.added.append(request.request_id)

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """What the test says."""
        length = self.answers.get(request_id, 0)
        return None if length is None else Match(max(0, length - local_tokens))

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """Note it."""
        assert tables == self.context.request_blocks(request_id)
        self.allocated_tokens.append((request_id, external_tokens))

    def plan_step(self, progress: StepProgress) -> bytes:
        """Note it."""
        self.progress.append(progress)
        return msgspec.msgpack.encode(Message())

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """What the test says, once."""
        del reports
        ended, self.ended = self.ended, EndedLoads()
        return ended

    def finished(self, request_id: str) -> None:
        """Note it."""
        self.finished_requests.append(request_id)

    def reset(self) -> bool:
        """What the test says."""
        return self.can_reset

    def take_events(self) -> Sequence[object]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing is open."""
