"""Asks several connectors about requests, and remembers who won until the request has blocks.

    match, match, ... match  ->  allocated: the winner is handed over, the round starts again

Children are asked anew each time. How long an undecided one is waited for counts from the first
time in the round, however often it changes its mind.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstrata.runtime.match_choice import Offer, best_offer, can_be_beaten
from kvstrata.runtime.seam import Match

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.runtime.multi_child import GuardedChild
    from kvstrata.runtime.seam import NewRequest, SchedulerConnector

_NOTHING: Final = Match(0)


@dataclass(slots=True)
class _Round:
    """One request's asking, from the first question until it has blocks."""

    request: NewRequest
    answers: Sequence[int | None] = ()
    """The latest, by the child's place; empty: none was asked."""
    waits: dict[int, float] = field(default_factory=dict)
    """When a child was undecided for the first time, by its place."""
    overdue: set[int] = field(default_factory=set)
    """Children that were undecided past their deadline."""
    winner: int | None = None


class MatchRounds:
    """The rounds of all living requests.

    Args:
        children: in the order of preference among equals.
        stride_tokens: every usable length is a multiple of this.
        clock: monotonic seconds.
    """

    def __init__(
        self, children: Sequence[GuardedChild], stride_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._children = children
        self._stride = stride_tokens
        self._clock = clock
        self._rounds: dict[str, _Round] = {}

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._rounds)

    def add(self, request: NewRequest) -> None:
        """A request has arrived."""
        self._rounds[request.request_id] = _Round(request)

    def forget(self, request_id: str) -> None:
        """A request has ended. Does nothing if it is not known."""
        self._rounds.pop(request_id, None)

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """What the best child can load; None: a child that may be better does not know yet."""
        asked = self._rounds.get(request_id)
        if asked is None:
            return _NOTHING
        most_tokens = self._most_tokens(asked.request, local_tokens)
        asked.answers = [
            self._answer(child, request_id, local_tokens, most_tokens) for child in self._children
        ]
        offers = self._offers(asked)
        best = best_offer(offers)
        asked.winner = None
        if can_be_beaten(offers, best, most_tokens):
            return None
        asked.winner = best
        return _NOTHING if best is None else Match(offers[best].tokens or 0)

    def take_winner(self, request_id: str) -> int | None:
        """A request has blocks: count its round's answers and hand over the winner, if any."""
        asked = self._rounds.get(request_id)
        if asked is None:
            return None
        if asked.answers:
            for child, tokens in zip(self._children, asked.answers, strict=True):
                if child.is_active:
                    child.tally.add_query(tokens)
        self._rounds[request_id] = _Round(asked.request)
        return asked.winner

    def check_invariants(self) -> None:
        """What is true between two calls."""
        for request_id, asked in self._rounds.items():
            assert asked.request.request_id == request_id
            assert asked.overdue <= asked.waits.keys(), request_id
            assert asked.winner is None or asked.answers[asked.winner], request_id

    def _most_tokens(self, request: NewRequest, local_tokens: int) -> int:
        """The longest hit that leaves a token to compute, beyond the engine's own."""
        return (len(request.tokens) - 1) // self._stride * self._stride - local_tokens

    def _answer(
        self, child: GuardedChild, request_id: str, local_tokens: int, most_tokens: int
    ) -> int | None:
        """Tokens that a child would load; one that promises what cannot be has none."""
        tokens = child.ask("match", lambda c: _match(c, request_id, local_tokens), 0)
        if not tokens:
            return tokens
        if not 0 < tokens <= most_tokens or (local_tokens + tokens) % self._stride:
            child.tally.unusable_answers += 1
            return 0
        return tokens

    def _offers(self, asked: _Round) -> list[Offer]:
        return [
            Offer(tokens, child.load_weight, tokens is None and self._is_awaited(asked, place))
            for place, (child, tokens) in enumerate(zip(self._children, asked.answers, strict=True))
        ]

    def _is_awaited(self, asked: _Round, place: int) -> bool:
        """Whether an undecided child still has time."""
        now, child = self._clock(), self._children[place]
        if now - asked.waits.setdefault(place, now) < child.match_deadline_s:
            return True
        if place not in asked.overdue:
            asked.overdue.add(place)
            child.tally.deadline_misses += 1
        return False


def _match(connector: SchedulerConnector, request_id: str, local_tokens: int) -> int | None:
    match = connector.match(request_id, local_tokens)
    return None if match is None else int(match.external_tokens)
