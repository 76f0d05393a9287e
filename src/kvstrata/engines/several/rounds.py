"""Which of several connectors loads a request, from the first question until it has blocks.

    decide, decide, ... decide  ->  take: the winner is handed over, the round starts again

Children are asked anew each time. How long an undecided one is waited for counts from the first
time in the round, however often it changes its mind. A child whose loads fail again and again for
one request is not asked for that request any more: it would fail for ever.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstrata.runtime.match_choice import Offer, best_offer, can_be_beaten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.engines.several.guard import GuardedChild

MOST_FAILED_LOADS: Final = 3
"""A child that failed this often for one request is not asked again."""


class Answer(NamedTuple):
    """What a child said about a request."""

    tokens: int | None
    """Tokens that it would load; None: it does not know yet."""
    is_async: bool = False
    """Whether the request waits for the load; otherwise it is loaded within a step."""


NOTHING: Final = Answer(0)
UNDECIDED: Final = Answer(None)


class Room(NamedTuple):
    """What a request has room for."""

    most_tokens: int
    """Tokens that it has beyond the engine's own hit."""
    takes_sync: bool
    """Whether a load within a step would be safe."""


class Winner(NamedTuple):
    """Who loads a request."""

    child: GuardedChild[Any]
    is_async: bool


def flaw_of(answer: Answer, room: Room) -> str | None:
    """What is wrong with an answer, if anything.

    The engine must have a token to compute in the step of a load that it does not wait for.
    """
    if not answer.tokens:
        return None
    most = room.most_tokens if answer.is_async else room.most_tokens - 1
    if not 0 < answer.tokens <= most:
        return "it offers tokens that a request does not have; taken as a miss"
    if not answer.is_async and not room.takes_sync:
        return (
            "it loads within a step, which is wrong for models with recurrent layers and cannot "
            "fail safely with several KV groups; its hits are taken as misses"
        )
    return None


@dataclass(slots=True)
class _Round:
    """One request's asking."""

    answers: Sequence[Answer] = ()
    """The latest, by the child's place; empty: none was asked."""
    waits: dict[int, float] = field(default_factory=dict)
    """When a child was undecided for the first time, by its place."""
    overdue: set[int] = field(default_factory=set)
    winner: int | None = None
    chosen: int | None = None
    """The latest winner, of this round or one before."""
    failures: Counter[int] = field(default_factory=Counter)
    """Loads that failed, by the child's place."""

    def restart(self) -> None:
        """The request has blocks."""
        self.answers, self.waits, self.overdue, self.winner = (), {}, set(), None


class Rounds:
    """The rounds of all requests that were asked about.

    Args:
        children: in the order of preference among equals.
        clock: monotonic seconds.
    """

    def __init__(self, children: Sequence[GuardedChild[Any]], clock: Callable[[], float]) -> None:
        self._children = children
        self._clock = clock
        self._rounds: dict[str, _Round] = {}

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._rounds)

    def may_ask(self, request_id: str, place: int) -> bool:
        """Whether a child's loads have not failed too often for this request."""
        asked = self._rounds.get(request_id)
        return asked is None or asked.failures[place] < MOST_FAILED_LOADS

    def decide(self, request_id: str, answers: Sequence[Answer], most_tokens: int) -> Answer:
        """What to tell the engine; undecided: a child that may be better does not know yet.

        Args:
            request_id: whose.
            answers: by the children's places.
            most_tokens: the longest hit that an undecided child could still bring.
        """
        asked = self._rounds.setdefault(request_id, _Round())
        asked.answers = answers
        offers = [self._offer(asked, place) for place in range(len(answers))]
        best = best_offer(offers)
        if can_be_beaten(offers, best, most_tokens):
            asked.winner = None
            return UNDECIDED
        asked.winner = asked.chosen = best
        return NOTHING if best is None else answers[best]

    def take(self, request_id: str) -> Winner | None:
        """A request has blocks: count its answers and hand over the winner, if any."""
        asked = self._rounds.get(request_id)
        if asked is None or not asked.answers:
            return None
        for child, answer in zip(self._children, asked.answers, strict=True):
            if child.is_active:
                child.tally.add_query(answer.tokens)
        place, answers = asked.winner, asked.answers
        asked.restart()
        return None if place is None else Winner(self._children[place], answers[place].is_async)

    def chosen(self, request_id: str) -> GuardedChild[Any] | None:
        """Who won last for a request."""
        asked = self._rounds.get(request_id)
        return None if asked is None or asked.chosen is None else self._children[asked.chosen]

    def fail(self, request_id: str, child_name: str) -> None:
        """A child's load failed. Does nothing for a request that is not known."""
        asked = self._rounds.get(request_id)
        for place, child in enumerate(self._children):
            if asked is not None and child.name == child_name:
                asked.failures[place] += 1

    def forget(self, request_id: str) -> None:
        """A request has ended. Does nothing if it is not known."""
        self._rounds.pop(request_id, None)

    def _offer(self, asked: _Round, place: int) -> Offer:
        tokens, child = asked.answers[place].tokens, self._children[place]
        return Offer(tokens, child.load_weight, tokens is None and self._has_time(asked, place))

    def _has_time(self, asked: _Round, place: int) -> bool:
        """Whether an undecided child is still waited for."""
        now, child = self._clock(), self._children[place]
        if now - asked.waits.setdefault(place, now) < child.match_deadline_s:
            return True
        if place not in asked.overdue:
            asked.overdue.add(place)
            child.tally.deadline_misses += 1
        return False
