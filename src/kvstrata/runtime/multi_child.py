"""One of several connectors: its scheduler half, with its faults kept inside.

    ACTIVE --a fault--> STOPPING --every rank has stopped it--> STOPPED

A connector promises that no exception leaves its hooks. One that breaks this while it is told
something can no longer be trusted with blocks: it is told nothing more, its worker halves are
stopped, and only then do its loads fail and its holds on blocks end, for until then its ranks may
still write to those blocks. A fault in the answer to a mere question is forgiven a few times.

Ownership: scheduler thread only.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from kvstrata.errors import ConfigError
from kvstrata.runtime.lent_blocks import LentBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.runtime.seam import SchedulerConnector, SchedulerContext

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Other = TypeVar("_Other")

MOST_FORGIVEN: Final = 8
"""A child with more faults than this is stopped, wherever they were."""


@dataclass(frozen=True, slots=True)
class Child:
    """One of several connectors.

    Raises:
        ConfigError: a number makes no sense.
    """

    name: str
    """Unique; its worker halves have the same."""
    connector: SchedulerConnector
    load_weight: float = 1.0
    """What a token that it loads is worth, next to those of others."""
    match_deadline_s: float = 1.0
    """How long a request waits while this child does not know what it has."""
    supports_hybrid_groups: bool = False
    """Whether it keeps layouts of several groups, or of groups that are not full attention."""

    def __post_init__(self) -> None:
        path = f"connectors.{self.name}"
        if not 0 < self.load_weight < math.inf:
            raise ConfigError(
                f"{path}.load_weight", f"it is {self.load_weight}", "a number above 0"
            )
        if not 0 <= self.match_deadline_s < math.inf:
            raise ConfigError(
                f"{path}.match_deadline_s", f"it is {self.match_deadline_s}", "0 seconds or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStats:
    """What a child has done. Queries are hits, misses and undecided ones."""

    queries: int = 0
    """Requests that were given blocks after this child was asked."""
    hits: int = 0
    """Those that it offered tokens for, whoever loaded them."""
    hit_tokens: int = 0
    """The tokens that it offered."""
    misses: int = 0
    undecided: int = 0
    """Those that went on without its answer."""
    deadline_misses: int = 0
    """Waits for its answer that lasted until its deadline."""
    unusable_answers: int = 0
    """Answers of a length that no request could go on from; taken as misses."""
    loads: int = 0
    """Loads that it was asked for."""
    loaded_tokens: int = 0
    """The tokens of those that are done."""
    failed_loads: int = 0
    pending_loads: int = 0
    stray_reports: int = 0
    """Loads that it reported though it was not asked for them; ignored."""
    faults: int = 0
    """Exceptions that left its hooks, on all ranks."""
    is_stopped: bool = False
    """Whether it is not used any more, because of a fault."""


@dataclass(slots=True)
class Tally:
    """The running counts behind `ChildStats`."""

    queries: int = 0
    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    undecided: int = 0
    deadline_misses: int = 0
    unusable_answers: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    stray_reports: int = 0
    faults: int = 0

    def add_query(self, tokens: int | None) -> None:
        """A request was given blocks after the child had answered this."""
        self.queries += 1
        if tokens is None:
            self.undecided += 1
        elif tokens:
            self.hits += 1
            self.hit_tokens += tokens
        else:
            self.misses += 1


class ChildState(Enum):
    """Whether a child is used."""

    ACTIVE = "active"
    STOPPING = "stopping"
    """Told nothing more; its ranks are being stopped."""
    STOPPED = "stopped"


class GuardedChild:
    """A child that cannot harm its neighbours.

    Args:
        child: what is guarded.
    """

    def __init__(self, child: Child) -> None:
        self.name = child.name
        self.load_weight = child.load_weight
        self.match_deadline_s = child.match_deadline_s
        self.tally = Tally()
        self.state = ChildState.ACTIVE
        self.is_unclean = False
        """STOPPED: whether some rank may still touch the caches."""
        self._connector = child.connector
        self._lent: LentBlocks | None = None

    @property
    def is_active(self) -> bool:
        """Whether it is used."""
        return self.state is ChildState.ACTIVE

    def bind(self, context: SchedulerContext) -> None:
        """Show it the engine's blocks, through a count of its holds."""
        lent = self._lent = LentBlocks(context)
        self.tell("bind_scheduler_context", lambda c: c.bind_scheduler_context(lent), None)

    def ask(
        self, hook: str, call: Callable[[SchedulerConnector], _T], otherwise: _Other
    ) -> _T | _Other:
        """Put a question; the other answer stands in for one that is not used or raises."""
        if not self.is_active:
            return otherwise
        try:
            return call(self._connector)
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            self.add_fault(hook, error)
            if self.tally.faults > MOST_FORGIVEN:
                self.stop()
            return otherwise

    def tell(
        self, hook: str, call: Callable[[SchedulerConnector], _T], otherwise: _Other
    ) -> _T | _Other:
        """Tell it something; if it raises, it is not used any more."""
        if not self.is_active:
            return otherwise
        try:
            return call(self._connector)
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            self.add_fault(hook, error)
            self.stop()
            return otherwise

    def add_fault(self, hook: str, error: Exception | str) -> None:
        """Count a fault; the first is logged."""
        self.tally.faults += 1
        if self.tally.faults == 1:
            details = error if isinstance(error, Exception) else None
            _log.error("connector %s: %s: %r", self.name, hook, error, exc_info=details)

    def stop(self) -> None:
        """Use it no more. Does nothing on successive calls."""
        if self.is_active:
            self.state = ChildState.STOPPING
            _log.error("connector %s is not used any more, because of a fault", self.name)

    def settle(self, *, is_unclean: bool) -> None:
        """Every rank has stopped it: its holds end, unless a rank may still touch the blocks."""
        self.state = ChildState.STOPPED
        self.is_unclean = is_unclean
        if self._lent and not is_unclean:
            self._lent.free_all()

    def close(self) -> None:
        """Close its scheduler half, used or not."""
        try:
            self._connector.close()
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            self.add_fault("close", error)

    def stats(self, pending_loads: int) -> ChildStats:
        """What it has done so far."""
        return ChildStats(
            **asdict(self.tally), pending_loads=pending_loads, is_stopped=not self.is_active
        )
