from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engines.several.rounds import (
    MOST_FAILED_LOADS,
    NOTHING,
    UNDECIDED,
    Answer,
    Room,
    Rounds,
    flaw_of,
)

from .children import Clock, a_child

if TYPE_CHECKING:
    from kvstrata.engines.several.guard import GuardedChild


class Rig:
    """Rounds over children a, b, ... with weights, and a clock."""

    def __init__(self, *weights: float, deadline_s: float = 1.0) -> None:
        self.clock = Clock()
        self.children: list[GuardedChild[Any]] = [
            a_child(name, load_weight=weight, match_deadline_s=deadline_s)
            for name, weight in zip("abcdef", weights, strict=False)
        ]
        self.rounds = Rounds(self.children, self.clock)

    def decide(self, *tokens: int | None, most: int = 64) -> int | None:
        answers = [Answer(each, bool(each)) for each in tokens]
        return self.rounds.decide("r", answers, most).tokens

    def take(self) -> str | None:
        winner = self.rounds.take("r")
        return None if winner is None else winner.child.name


def test_the_most_weighed_tokens_win() -> None:
    rig = Rig(1.0, 2.0)
    assert rig.decide(48, 32) == 32
    chosen = rig.rounds.chosen("r")
    assert chosen is rig.children[1]
    assert rig.take() == "b"


def test_the_first_wins_among_equals() -> None:
    rig = Rig(1.0, 1.0)
    assert rig.decide(32, 32) == 32
    assert rig.take() == "a"


def test_nobody_wins_with_nothing() -> None:
    rig = Rig(1.0, 1.0)
    assert rig.rounds.decide("r", [NOTHING, NOTHING], 64) == NOTHING
    assert rig.rounds.chosen("r") is None
    assert rig.take() is None


def test_an_undecided_child_is_waited_for_until_its_deadline() -> None:
    rig = Rig(1.0, 2.0, deadline_s=1.0)
    assert rig.decide(32, None) is None
    rig.clock.now_s += 0.9
    assert rig.decide(32, None) is None
    rig.clock.now_s += 0.1
    assert rig.decide(32, None) == 32
    assert rig.take() == "a"
    assert rig.children[1].tally.deadline_misses == 1
    assert rig.children[1].tally.undecided == 1


def test_a_child_that_changes_its_mind_gets_no_more_time() -> None:
    rig = Rig(1.0, 2.0, deadline_s=1.0)
    assert rig.decide(32, None) is None
    assert rig.decide(32, 0) == 32
    rig.clock.now_s += 1
    assert rig.decide(32, None) == 32


def test_an_undecided_child_that_could_not_win_is_not_waited_for() -> None:
    rig = Rig(1.0, 1.0)
    assert rig.decide(64, None, most=64) == 64  # at best it would be an equal, behind
    assert rig.decide(None, 64, most=64) is None  # before: it would win
    assert rig.decide(0, None, most=0) == 0


def test_the_wait_starts_again_with_the_next_round() -> None:
    rig = Rig(1.0)
    rig.decide(None)
    rig.clock.now_s += 5
    assert rig.decide(None) == 0
    rig.take()
    assert rig.decide(None) is None


def test_answers_are_counted_once_when_the_request_has_blocks() -> None:
    rig = Rig(1.0, 1.0)
    for _ in range(3):
        rig.decide(32, 0)
    rig.take()
    assert rig.take() is None  # the engine tells of more blocks after a load
    first, second = rig.children
    assert (first.tally.queries, first.tally.hits, first.tally.hit_tokens) == (1, 1, 32)
    assert (second.tally.queries, second.tally.misses) == (1, 1)


def test_stopped_children_are_not_counted() -> None:
    rig = Rig(1.0)
    rig.decide(0)
    rig.children[0].fail("hook", "fault")
    rig.take()
    assert rig.children[0].tally.queries == 0


def test_the_winner_is_known_until_the_request_ends() -> None:
    rig = Rig(1.0)
    rig.decide(32)
    rig.take()
    assert rig.rounds.chosen("r") is rig.children[0]
    rig.rounds.forget("r")
    rig.rounds.forget("r")
    assert rig.rounds.chosen("r") is None
    assert len(rig.rounds) == 0


def test_a_child_that_fails_again_and_again_is_not_asked_for_that_request() -> None:
    rig = Rig(1.0, 1.0)
    rig.decide(32, 0)
    for _ in range(MOST_FAILED_LOADS):
        assert rig.rounds.may_ask("r", 0)
        rig.rounds.fail("r", "a")
    rig.rounds.fail("unknown", "a")
    assert not rig.rounds.may_ask("r", 0)
    assert rig.rounds.may_ask("r", 1)
    assert rig.rounds.may_ask("other", 0)


def test_whether_the_engine_waits_is_the_winners_answer() -> None:
    rig = Rig(1.0, 2.0)
    answers = [Answer(32, is_async=True), Answer(32, is_async=False)]
    assert rig.rounds.decide("r", answers, 64) == Answer(32, is_async=False)
    winner = rig.rounds.take("r")
    assert winner is not None
    assert not winner.is_async


@pytest.mark.parametrize(
    ("answer", "takes_sync", "is_flawed"),
    [
        (NOTHING, False, False),
        (UNDECIDED, False, False),
        (Answer(64, is_async=True), False, False),
        (Answer(65, is_async=True), False, True),
        (Answer(-16, is_async=True), False, True),
        (Answer(63, is_async=False), True, False),
        (Answer(64, is_async=False), True, True),
        (Answer(32, is_async=False), False, True),
    ],
)
def test_answers_that_cannot_be_used(answer: Answer, takes_sync: bool, is_flawed: bool) -> None:  # noqa: FBT001
    assert (flaw_of(answer, Room(64, takes_sync)) is not None) == is_flawed


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 64), st.floats(0.5, 4.0)), min_size=1, max_size=5)
)
def test_time_always_leads_to_the_best_answer_that_is_known(
    said: list[tuple[int | None, float]],
) -> None:
    rig = Rig(*(weight for _, weight in said))
    tokens = [each for each, _ in said]
    rig.decide(*tokens)
    rig.clock.now_s += 10
    answer = rig.decide(*tokens)
    best = max((each or 0) * weight for each, weight in said)
    assert answer is not None
    winner = rig.rounds.chosen("r")
    assert (answer * winner.load_weight if winner else 0) == best
