"""Leaves a tier alone while it is broken, and tries it again by itself.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Callable

Ticket = NewType("Ticket", int)
"""A call's number; tells a probe from calls that began before the breaker opened."""


class BreakerState(StrEnum):
    """Whether a tier is used."""

    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left alone."""
    PROBING = "probing"
    """One call is under way to see whether it works again."""


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens and how long it stays so."""

    max_faults: int = 3
    """Faults in a row until it opens."""
    slow_s: float = 5.0
    """A call that keeps the medium busy for longer is a fault, whatever it brought."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


class Breaker:
    """One tier's breaker.

    Args:
        clock: monotonic seconds.
        rules: its thresholds.
    """

    def __init__(self, clock: Callable[[], float], rules: BreakerRules | None = None) -> None:
        self._clock = clock
        self._rules = rules or BreakerRules()
        self._tickets = itertools.count(1)
        self._num_faults = 0
        self._pause_s = self._rules.first_pause_s
        self._opened_at: float | None = None
        self._probe: Ticket | None = None

    @property
    def state(self) -> BreakerState:
        """Whether the tier is used now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._probe is None else BreakerState.PROBING

    def allows(self) -> bool:
        """Whether a call may start now. Changes nothing."""
        if self._opened_at is None:
            return True
        return self._probe is None and self._clock() >= self._opened_at + self._pause_s

    def started(self) -> Ticket:
        """A call has started; on an open breaker it is the probe."""
        ticket = Ticket(next(self._tickets))
        if self._opened_at is not None and self._probe is None:
            self._probe = ticket
        return ticket

    def succeeded(self, ticket: Ticket, seconds: float) -> None:
        """A call has ended without a fault, after the medium was busy for so long."""
        if seconds > self._rules.slow_s:
            self.failed(ticket)
        elif self._counts(ticket):
            self._num_faults = 0
            self._opened_at = self._probe = None
            self._pause_s = self._rules.first_pause_s

    def failed(self, ticket: Ticket) -> None:
        """A call has ended with a fault, or not at all by its deadline."""
        if not self._counts(ticket):
            return
        self._num_faults += 1
        if self._probe is not None:
            self._pause_s = min(2 * self._pause_s, self._rules.longest_pause_s)
        if self._probe is not None or self._num_faults >= self._rules.max_faults:
            self._opened_at = self._clock()
        self._probe = None

    def undecided(self, ticket: Ticket) -> None:
        """A call has ended in a way that says nothing about the tier; another probe may start."""
        if ticket == self._probe:
            self._probe = None

    def _counts(self, ticket: Ticket) -> bool:
        """Once open, the probe alone decides: other calls began before."""
        return self._opened_at is None or ticket == self._probe
