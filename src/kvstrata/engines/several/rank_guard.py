"""One of several connectors beside a rank, with its faults kept inside.

    OPEN --stopped beside the scheduler--> DRAINING --nothing under way, or too late--> CLOSED
    OPEN or DRAINING --a fault--> CLOSED

A closed child was shut down: it touches no cache any more, so what it had under way can be given
up. One whose shutting down raised is unclean: nobody knows.

Ownership: the rank's thread.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")
Other = TypeVar("Other")

DRAIN_S: Final = 10.0
"""How long a stopped child may take to end what it has under way."""


class RankState(Enum):
    """Whether a child is used on this rank."""

    OPEN = "open"
    DRAINING = "draining"
    """It is given nothing more to do."""
    CLOSED = "closed"


class RankChild(Generic[C]):
    """A child that cannot harm its neighbours.

    Args:
        name: the one that the scheduler has for it.
        connector: what is guarded; has `shutdown`.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, connector: C, clock: Callable[[], float]) -> None:
        self.name = name
        self.connector = connector
        self.state = RankState.OPEN
        self._clock = clock
        self.is_unclean = False
        """CLOSED: whether it may still touch the caches, because shutting it down raised."""
        self._drain_until_s = 0.0
        self._fault: str | None = None
        self._said: set[str] = set()

    @property
    def is_closed(self) -> bool:
        """Whether it touches no cache any more."""
        return self.state is RankState.CLOSED

    @property
    def is_late(self) -> bool:
        """Whether it had its time to end what is under way."""
        return self.state is RankState.DRAINING and self._clock() >= self._drain_until_s

    def call(self, hook: str, call: Callable[[C], T], otherwise: Other) -> T | Other:
        """Ask or tell it something; if it is closed or raises, the other answer stands in."""
        if self.is_closed:
            return otherwise
        try:
            return call(self.connector)
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            _log.exception("connector %s: %s; it is closed on this rank", self.name, hook)
            self._fault = f"{hook}: {error!r}"
            self.close()
            return otherwise

    def drain(self) -> None:
        """Give it nothing more to do. Does nothing on successive calls."""
        if self.state is RankState.OPEN:
            self.state = RankState.DRAINING
            self._drain_until_s = self._clock() + DRAIN_S

    def close(self) -> None:
        """Shut it down. Does nothing on successive calls."""
        if self.is_closed:
            return
        self.state = RankState.CLOSED
        try:
            self.connector.shutdown()  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - the same
            _log.exception("connector %s could not be shut down", self.name)
            self.is_unclean = True

    def say_once(self, text: str) -> None:
        """Log what is wrong but harms nobody, the first time."""
        if text not in self._said:
            self._said.add(text)
            _log.error("connector %s: %s", self.name, text)

    def take_fault(self) -> str | None:
        """Hand over the fault that closed it, once."""
        fault, self._fault = self._fault, None
        return fault
