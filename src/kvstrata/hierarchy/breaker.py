"""Leaves a tier alone while it is broken, and tries it again by itself.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
    """A call that takes longer is a fault, whatever it brought."""
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
        self._num_faults = 0
        self._pause_s = self._rules.first_pause_s
        self._opened_at: float | None = None
        self._is_probing = False

    @property
    def state(self) -> BreakerState:
        """Whether the tier is used now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.PROBING if self._is_probing else BreakerState.OPEN

    def allows(self) -> bool:
        """Whether a call may start now. Changes nothing."""
        if self._opened_at is None:
            return True
        return not self._is_probing and self._clock() >= self._opened_at + self._pause_s

    def started(self) -> None:
        """A call has started; on an open breaker it is the probe."""
        self._is_probing = self._opened_at is not None

    def succeeded(self, seconds: float) -> None:
        """A call has ended without a fault, after so long."""
        if seconds > self._rules.slow_s:
            self.failed()
            return
        self._num_faults = 0
        self._opened_at = None
        self._is_probing = False
        self._pause_s = self._rules.first_pause_s

    def failed(self) -> None:
        """A call has ended with a fault, or not at all by its deadline."""
        self._num_faults += 1
        if self._is_probing:
            self._pause_s = min(2 * self._pause_s, self._rules.longest_pause_s)
        if self._is_probing or self._num_faults >= self._rules.max_faults:
            self._opened_at = self._clock()
        self._is_probing = False
