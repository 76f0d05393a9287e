from __future__ import annotations

from kvstrata.hierarchy.breaker import Breaker, BreakerRules, BreakerState

RULES = BreakerRules(max_faults=2, slow_s=1.0, first_pause_s=10.0, longest_pause_s=15.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fails(breaker: Breaker) -> None:
    breaker.failed(breaker.started())


def succeeds(breaker: Breaker, seconds: float = 0.1) -> None:
    breaker.succeeded(breaker.started(), seconds)


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock, RULES)
    fails(breaker)
    fails(breaker)
    return breaker


def test_it_opens_after_faults_in_a_row() -> None:
    breaker = Breaker(Clock(), RULES)
    fails(breaker)
    succeeds(breaker)
    fails(breaker)
    assert breaker.allows()
    fails(breaker)
    assert not breaker.allows()
    assert breaker.state is BreakerState.OPEN


def test_slowness_is_a_fault() -> None:
    breaker = Breaker(Clock(), RULES)
    succeeds(breaker, 1.5)
    succeeds(breaker, 1.5)

    assert breaker.state is BreakerState.OPEN


def test_one_probe_closes_it_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 10.0
    assert breaker.allows()
    probe = breaker.started()
    assert breaker.state is BreakerState.PROBING
    assert not breaker.allows(), "one probe at a time"
    breaker.succeeded(probe, 0.1)
    assert str(breaker.state) == "closed"


def test_a_probe_that_fails_makes_the_pause_longer_up_to_a_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 10.0
    fails(breaker)
    clock.now = 24.9
    assert not breaker.allows()
    clock.now = 25.0
    assert breaker.allows()
    fails(breaker)
    clock.now = 40.0
    assert breaker.allows()


def test_calls_that_began_before_it_opened_decide_nothing() -> None:
    clock = Clock()
    breaker = Breaker(clock, RULES)
    early = [breaker.started() for _ in range(4)]
    breaker.failed(early[0])
    breaker.failed(early[1])
    breaker.succeeded(early[2], 0.1)
    assert breaker.state is BreakerState.OPEN
    clock.now = 10.0
    probe = breaker.started()
    breaker.failed(early[3])
    assert str(breaker.state) == "probing"
    breaker.succeeded(probe, 0.1)
    assert str(breaker.state) == "closed"


def test_a_probe_that_says_nothing_lets_another_start() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = 10.0
    breaker.undecided(breaker.started())

    assert breaker.state is BreakerState.OPEN
    assert breaker.allows()
