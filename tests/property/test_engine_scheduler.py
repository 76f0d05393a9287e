"""The engine's scheduler as a state machine, on a device that knows what every block holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, floor_to
from kvstrata.engine.scheduling.chunking import state_stride
from kvstrata.engine.scheduling.request import FinishReason, Request, RequestState
from kvstrata.engine.scheduling.scheduler import Scheduler, SchedulerSettings
from kvstrata.engine.scheduling.step import SamplingParams, StepResult
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group
from kvstrata.testing.memory_connector import Behaviour

from .fake_connectors import BoldScheduler, BoldWorker, CountingScheduler
from .fake_device import FakeDevice, FakeWorker, Place

if TYPE_CHECKING:
    from kvstrata.core.layout import KVGroup, KVLayout
    from kvstrata.engine.scheduling.scheduler import Step
    from kvstrata.runtime.seam import BlockView

MOST_STEPS = 4000
STEMS = ([0, 1, 2, 0, 1, 1, 2, 2] * 6, [0, 1, 2, 0, 2, 1, 0, 0] * 6)
"""Prompts begin like one of these, which begin alike."""


@st.composite
def groups(draw: st.DrawFn, sizes: list[int]) -> KVGroup:
    """A group of any kind with tiny blocks."""
    kind, size = draw(st.sampled_from(GroupKind)), draw(st.sampled_from(sizes))
    if kind is GroupKind.FULL:
        return full_group(size)
    if kind is GroupKind.RECURRENT:
        return recurrent_group(size)
    return window_group(draw(st.integers(1, 12)), size)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """One to four groups, mostly of sizes that do not divide each other."""
    sizes = draw(st.sampled_from([[4], [2, 4], [2, 3], [4, 6], [2, 6, 10], [3, 5], [1, 8]]))
    chosen = draw(st.lists(groups(sizes), min_size=1, max_size=4))
    return a_layout(*chosen)


class Order(NamedTuple):
    """What a user asks for."""

    prompt: list[int]
    max_tokens: int
    salt: str | None


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Prompts that often share a prefix."""
    shared = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 40))]
    prompt = shared + draw(st.sampled_from([[], [0], [1], [2, 2]])) or [0]
    return Order(prompt, draw(st.integers(1, 9)), draw(st.sampled_from([None, None, None, "a"])))


@dataclass(frozen=True)
class Case:
    """One engine."""

    layout: KVLayout
    num_blocks: int
    settings: SchedulerSettings
    connector: str
    load_steps: int
    most_loaded: int
    """How long a prefix the bold connector claims to have, at first."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Pools that hold one long request, or little more."""
    layout, longest = draw(layouts()), draw(st.integers(10, 32))
    spare = draw(st.sampled_from([0, 1, 3, 8, 20]))
    return Case(
        layout,
        1 + sum(ceil_div(longest, group.block_tokens) for group in layout.groups) + spare,
        SchedulerSettings(
            max_step_tokens=draw(st.sampled_from([1, 3, 7, 16, 64])),
            max_running=draw(st.integers(1, 4)),
            max_request_tokens=longest,
        ),
        draw(st.sampled_from(["none", "memory", "memory", "bold", "bold"])),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 30)),
    )


@dataclass
class Sent:
    """A request that was taken."""

    request: Request
    max_tokens: int
    is_aborted: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """Requests in any order, with and without a connector; ranks are a fake device."""

    @initialize(case=cases())
    def begin(self, case: Case) -> None:
        self.layout, self.settings = case.layout, case.settings
        self.num_blocks = case.num_blocks
        self.behaviour = Behaviour(load_steps=case.load_steps)
        self.device = FakeDevice(case.layout)
        self.connector: CountingScheduler | BoldScheduler | None = None
        self.worker: FakeWorker | BoldWorker | None = None
        if case.connector == "memory":
            self.connector = CountingScheduler(case.layout, self.behaviour)
            self.worker = FakeWorker(self.device)
        elif case.connector == "bold":
            self.connector = BoldScheduler(case.layout, self.behaviour)
            self.connector.most_tokens = case.most_loaded
            self.worker = BoldWorker(self.device)
        self.scheduler = Scheduler(case.layout, case.num_blocks, case.settings, self.connector)
        self.sent: list[Sent] = []
        self.touched: Counter[int] = Counter()
        self.step: Step | None = None

    @property
    def living(self) -> list[Sent]:
        return [s for s in self.sent if s.request.finish_reason is None]

    @rule(orders=st.lists(orders(), min_size=1, max_size=4))
    def add(self, orders: list[Order]) -> None:
        for order in orders:
            prompt = order.prompt[: self.settings.max_request_tokens - order.max_tokens]
            sampling = SamplingParams(max_tokens=order.max_tokens)
            name = f"r{len(self.sent)}"
            request = Request(name, prompt, sampling, self.layout, order.salt)
            self.scheduler.add(request)
            self.device.truths.begin(request, order.salt)
            self.sent.append(Sent(request, order.max_tokens))

    @precondition(lambda self: self.step is None)
    @rule()
    def schedule(self) -> None:
        self.step = self.scheduler.schedule()
        sequences = self.step.plan.sequences
        assert sum(len(s.token_ids) for s in sequences) <= self.settings.max_step_tokens
        assert len({s.request_id for s in sequences}) == len(sequences)
        stride = state_stride(self.layout)
        for request, sequence in zip(self.step.requests, sequences, strict=True):
            last_state = floor_to(len(request.tokens) - 1, stride) if stride else 0
            assert not sequence.start < last_state < sequence.stop, "no state is left to use again"

    @precondition(lambda self: self.step is not None)
    @rule()
    def compute(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        if self.worker:
            assert step.plan.connector_message is not None
            self.worker.start_step(step.plan.connector_message)
        drawn = self.device.compute(step)
        self.check_offered_states(step)
        report = self.worker.finish_step() if self.worker else None
        self.scheduler.update(step, [StepResult(drawn, connector_report=report)])
        for request in step.requests:
            self.device.truths.learn_names(request)

    def check_offered_states(self, step: Step) -> None:
        if isinstance(self.connector, CountingScheduler):
            requests = {request.request_id: request for request in step.requests}
            for request_id, state in self.connector.offered:
                node = self.device.truths[requests[request_id]].nodes[state.num_tokens]
                self.device.check(Place(state.block_id, state.group_id, 0, node))

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        for _ in range(count):
            if self.step is None:
                self.schedule()
            self.compute()
            self.check_blocks()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.living))
        self.scheduler.abort(sent.request.request_id)
        sent.is_aborted = True

    @rule()
    def reset_cache(self) -> None:
        assert self.scheduler.reset_cache()

    @precondition(lambda self: self.connector is not None)
    @rule(
        load_steps=st.integers(0, 5),
        undecided=st.integers(0, 2),
        failing_loads=st.sampled_from([0, 0, 1, 5]),
        is_holding=st.booleans(),
        most_tokens=st.integers(0, 50),
    )
    def misbehave(self, most_tokens: int, **changes: int) -> None:
        for name, value in changes.items():
            setattr(self.behaviour, name, value)
        if isinstance(self.connector, BoldScheduler):
            self.connector.most_tokens = most_tokens

    @rule(block=st.integers(0, 60))
    def touch(self, block: int) -> None:
        block %= self.num_blocks
        self.scheduler.blocks.pool.hold([block])
        self.touched[block] += block > 0

    @rule()
    def let_go(self) -> None:
        self.scheduler.blocks.pool.release(list(self.touched.elements()))
        self.touched.clear()

    @invariant()
    def check_blocks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.step is None:
            self.scheduler.check_invariants()
        views = [self.scheduler.blocks.pool.view(block) for block in range(self.num_blocks)]
        self.check_holders(views)
        self.check_queue(views)
        self.check_identities(views)

    def check_holders(self, views: list[BlockView]) -> None:
        """Reference counts are the sum of tables, the connector's holds and ours."""
        holders = Counter(self.touched)
        if self.connector:
            holders.update(self.connector.context.held)
        holding = [sent for sent in self.sent if sent.request.tables]
        for sent in holding:
            for table in sent.request.tables:
                holders.update(block for block in table.blocks if block)
        assert [view.ref_count for view in views] == [holders[b] for b in range(self.num_blocks)]
        assert len(holding) <= self.settings.max_running

    def check_queue(self, views: list[BlockView]) -> None:
        """All blocks that nobody holds, those without a name first."""
        free = [view.block_id for view in self.scheduler.blocks.pool.walk_free()]
        assert len(free) == self.scheduler.blocks.pool.num_free
        assert sorted(free) == [v.block_id for v in views if not v.ref_count and not v.is_null]
        is_known = [views[block].block_hash is not None for block in free]
        assert is_known == sorted(is_known)

    def check_identities(self, views: list[BlockView]) -> None:
        """What a block's name promises is what it holds."""
        for view in views:
            if view.block_hash is not None and view.group_id is not None:
                expected = self.device.expected(view.block_hash, view.group_id)
                found = self.device.blocks[view.block_id]
                assert found == expected, f"block {view.block_id}: {found}, not {expected}"

    def teardown(self) -> None:
        """Whatever happened, every request ends and all blocks come back."""
        if not hasattr(self, "scheduler"):
            return
        self.let_go()
        self.behaviour.is_holding = False
        steps = 0
        while self.scheduler.has_work or self.step:
            steps += 1
            assert steps < MOST_STEPS, f"no end: {[vars(s.request) for s in self.living]}"
            self.run(1)
        self.schedule()
        self.compute()
        self.check_blocks()
        assert self.scheduler.blocks.pool.num_free == self.num_blocks - 1
        for sent in self.sent:
            self.check_ended(sent)

    def check_ended(self, sent: Sent) -> None:
        request = sent.request
        assert request.state is RequestState.ENDED
        if sent.is_aborted:
            assert request.finish_reason is FinishReason.ABORTED
        else:
            assert request.finish_reason is FinishReason.LENGTH
            assert len(request.output) == sent.max_tokens
            assert request.tokens == self.device.truths[request].tokens
        cached = request.local_hit_tokens + request.external_hit_tokens
        assert cached < len(request.tokens)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=15)
