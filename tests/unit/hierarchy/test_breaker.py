from __future__ import annotations

from kvstrata.hierarchy.breaker import Breaker, BreakerRules, BreakerState

RULES = BreakerRules(max_faults=2, slow_s=1.0, first_pause_s=10.0, longest_pause_s=15.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock, RULES)
    breaker.failed()
    breaker.failed()
    return breaker


def test_it_opens_after_faults_in_a_row() -> None:
    breaker = Breaker(Clock(), RULES)
    breaker.failed()
    breaker.succeeded(0.1)
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.state is BreakerState.OPEN


def test_slowness_is_a_fault() -> None:
    breaker = Breaker(Clock(), RULES)
    breaker.succeeded(1.5)
    breaker.succeeded(1.5)

    assert breaker.state is BreakerState.OPEN


def test_one_probe_closes_it_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 10.0
    assert breaker.allows()
    breaker.started()
    assert breaker.state is BreakerState.PROBING
    assert not breaker.allows(), "one probe at a time"
    breaker.succeeded(0.1)
    assert str(breaker.state) == "closed"


def test_a_probe_that_fails_makes_the_pause_longer_up_to_a_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 10.0
    breaker.started()
    breaker.failed()
    clock.now = 24.9
    assert not breaker.allows()
    clock.now = 25.0
    assert breaker.allows()
    breaker.started()
    breaker.failed()
    clock.now = 40.0
    assert breaker.allows()


def test_a_call_that_began_before_it_opened_is_no_probe() -> None:
    clock = Clock()
    breaker = Breaker(clock, RULES)
    breaker.started()
    breaker.failed()
    breaker.failed()
    breaker.failed()

    assert breaker.state is BreakerState.OPEN
    clock.now = 10.0
    assert breaker.allows(), "the pause did not grow"
