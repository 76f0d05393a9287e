"""One of several connectors beside the scheduler, with its faults kept inside.

A child whose hook raises is stopped: it is asked and told nothing more, except what lets go of
things it has under way. The engine never notices.

Ownership: scheduler thread only.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstrata.runtime.multi_child import ChildStats, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.engines.several.settings import ChildSettings

_log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")
Other = TypeVar("Other")


class GuardedChild(Generic[C]):
    """A child that cannot harm its neighbours.

    Args:
        settings: its name and what it is worth.
        connector: what is guarded.
    """

    def __init__(self, settings: ChildSettings, connector: C) -> None:
        self.name = settings.name
        self.load_weight = settings.load_weight
        self.match_deadline_s = settings.match_deadline_s
        self.connector = connector
        self.tally = Tally()
        self.is_active = True
        """Whether it is used."""
        self._said: set[str] = set()

    def use(self, hook: str, call: Callable[[C], T], otherwise: Other) -> T | Other:
        """Ask or tell it something; if it is stopped or raises, the other answer stands in."""
        return self.settle(hook, call, otherwise) if self.is_active else otherwise

    def settle(self, hook: str, call: Callable[[C], T], otherwise: Other) -> T | Other:
        """The same, also if it is stopped: for hooks that let go of what is under way."""
        try:
            return call(self.connector)
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            self.fail(hook, error)
            return otherwise

    def fail(self, hook: str, error: Exception | str) -> None:
        """Count a fault and use the child no more; the first fault is logged."""
        self.tally.faults += 1
        if self.is_active:
            self.is_active = False
            details = error if isinstance(error, Exception) else None
            _log.error(
                "connector %s is not used any more: %s: %r",
                self.name,
                hook,
                error,
                exc_info=details,
            )

    def say_once(self, text: str) -> None:
        """Warn about something that is not a fault, the first time."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("connector %s: %s", self.name, text)

    def stats(self, pending_loads: int) -> ChildStats:
        """What it has done so far."""
        return ChildStats(
            **asdict(self.tally), pending_loads=pending_loads, is_stopped=not self.is_active
        )
