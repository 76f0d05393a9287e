"""Whether loading beats computing, from what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.planning.cost import Speed, is_load_worth
from kvstrata.planning.load_plan import LoadBounds, LoadPlan, choose_load
from kvstrata.runtime.seam import RequestProgress, StepProgress
from kvstrata.runtime.speeds import MeasuredSpeeds
from kvstrata.testing.builders import a_geometry, a_layout, full_group, lookups_with
from kvstrata.transfers.copy_queue import CopyReport

from .requests import a_request

GEOMETRY = a_geometry(a_layout(full_group(16)), 16)
BYTES = 16 * 64  # of a chunk


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestSpeed:
    def test_nothing_is_known_at_first(self) -> None:
        assert Speed().seconds(100) is None

    def test_the_first_measurement_is_believed_and_others_are_smoothed(self) -> None:
        speed = Speed().measured(100, 1)
        assert speed.seconds(200) == pytest.approx(2)
        assert speed.measured(200, 1).per_s == pytest.approx(120)

    def test_no_time_at_all_is_no_division_by_zero(self) -> None:
        assert Speed().measured(100, 0).seconds(100) == pytest.approx(1e-9)

    def test_a_speed_of_nothing_is_no_knowledge(self) -> None:
        assert Speed().measured(0, 1).seconds(100) is None

    @given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e6)), max_size=20))
    def test_it_is_never_negative(self, measurements: list[tuple[float, float]]) -> None:
        speed = Speed()
        for amount, seconds in measurements:
            speed = speed.measured(amount, seconds)
        assert speed.per_s is None or speed.per_s >= 0


class TestIsLoadWorth:
    def test_it_is_while_speeds_are_not_known(self) -> None:
        known = Speed(1.0)
        assert is_load_worth(1, 10**9, compute=Speed(), copy=known, overhead_s=9)
        assert is_load_worth(1, 10**9, compute=known, copy=Speed(), overhead_s=9)

    @pytest.mark.parametrize(
        ("num_tokens", "overhead_s", "is_worth"), [(100, 0, True), (100, 9.5, False), (9, 0, False)]
    )
    def test_the_faster_way_is_taken(
        self,
        num_tokens: int,
        overhead_s: float,
        is_worth: bool,  # noqa: FBT001
    ) -> None:
        # 10 tokens/s computed, 1,000 bytes/s copied: 1,000 bytes take a second.
        assert is_worth is is_load_worth(
            num_tokens, 1000, compute=Speed(10.0), copy=Speed(1000.0), overhead_s=overhead_s
        )


class TestMeasuredSpeeds:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def speeds(self, clock: Clock) -> MeasuredSpeeds:
        return MeasuredSpeeds(clock)

    def step(self, speeds: MeasuredSpeeds, clock: Clock, seconds: float, **computed: int) -> None:
        running = [RequestProgress(name, tokens) for name, tokens in computed.items()]
        speeds.step_planned(StepProgress(running))
        clock.now += seconds
        speeds.step_reported()

    def is_worth(self, speeds: MeasuredSpeeds) -> bool:
        request = a_request(GEOMETRY, 1601)
        plan = a_plan(1601)
        assert plan.external_tokens == 1600
        return speeds.is_worth(request, plan)

    def test_a_slow_copy_is_not_worth_it(self, speeds: MeasuredSpeeds, clock: Clock) -> None:
        self.step(speeds, clock, 1, one=512)
        self.step(speeds, clock, 0.1, one=1024)  # 5,120 tokens a second: 0.3 s for the plan
        assert self.is_worth(speeds), "nothing is known of copies"
        speeds.load_reported(CopyReport(1, frozenset(), 1000, 1.0))
        assert not self.is_worth(speeds)

    def test_a_fast_copy_is(self, speeds: MeasuredSpeeds, clock: Clock) -> None:
        self.step(speeds, clock, 1, one=512)
        self.step(speeds, clock, 0.1, one=1024)
        speeds.load_reported(CopyReport(1, frozenset(), 10**9, 1.0))
        assert self.is_worth(speeds)

    def test_a_hit_is_not_taken_for_computing(self, speeds: MeasuredSpeeds, clock: Clock) -> None:
        self.step(speeds, clock, 0.001, one=100_000)  # nearly all of it was on the device
        speeds.load_reported(CopyReport(1, frozenset(), 1, 1.0))
        assert self.is_worth(speeds), "what a first step computes is not known"

    def test_small_steps_say_nothing(self, speeds: MeasuredSpeeds, clock: Clock) -> None:
        self.step(speeds, clock, 1, one=512)
        self.step(speeds, clock, 0.001, one=513)
        speeds.load_reported(CopyReport(1, frozenset(), 1, 1.0))
        assert self.is_worth(speeds)


def a_plan(num_tokens: int) -> LoadPlan:
    return choose_load(GEOMETRY, lookups_with(GEOMETRY, num_tokens), LoadBounds(num_tokens))


def test_the_time_to_compute_is_known_after_a_step_with_many_tokens() -> None:
    now = [0.0]
    speeds = MeasuredSpeeds(lambda: now[0])
    assert speeds.compute_s(1000) is None
    for computed in (128, 256):
        speeds.step_planned(StepProgress([RequestProgress("a", computed)]))
        now[0] += 0.5
        speeds.step_reported()

    assert speeds.compute_s(1024) == pytest.approx(4.0)
