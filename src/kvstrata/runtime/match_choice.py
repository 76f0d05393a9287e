"""Which of several connectors loads a request: the most tokens, weighed; the first of equals."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Offer(NamedTuple):
    """What one connector would load."""

    tokens: int | None
    """None: it does not know yet."""
    weight: float
    is_awaited: bool = False
    """Not known yet, and worth waiting for."""

    @property
    def score(self) -> float:
        """What counts in the choice; 0: nothing is offered."""
        return (self.tokens or 0) * self.weight


def best_offer(offers: Sequence[Offer]) -> int | None:
    """The place of the highest score, the first of equals; None: nobody offers anything."""
    best = max(range(len(offers)), key=lambda place: offers[place].score, default=None)
    return best if best is not None and offers[best].score > 0 else None


def can_be_beaten(offers: Sequence[Offer], best: int | None, most_tokens: int) -> bool:
    """Whether an offer that is awaited could win, if it brought the most that is possible."""
    if most_tokens <= 0:
        return False
    for place, offer in enumerate(offers):
        if not offer.is_awaited:
            continue
        if best is None:
            return True
        score = most_tokens * offer.weight
        if score > offers[best].score or (score == offers[best].score and place < best):
            return True
    return False
