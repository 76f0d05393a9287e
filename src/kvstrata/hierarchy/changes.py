"""What the ranks' reports have changed in a stack of tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata.core.ids import ChunkKey
    from kvstrata.hierarchy.lower_tier import Fault
    from kvstrata.hierarchy.task_queue import Verb


class Moved(NamedTuple):
    """Bytes that one job read from or wrote to a lower tier, on each rank."""

    tier: str
    verb: Verb
    num_bytes: int
    seconds: float


class Changes(NamedTuple):
    """What reports that were taken in together have brought."""

    arrived: tuple[tuple[str, ChunkKey], ...] = ()
    """READY in host memory now, with the tier they came from."""
    lost: tuple[ChunkKey, ...] = ()
    """Promotions that ended without their chunk."""
    evicted: tuple[ChunkKey, ...] = ()
    """Left host memory to make room for promotions."""
    written: tuple[tuple[str, ChunkKey], ...] = ()
    """In a lower tier now, on every rank."""
    faults: tuple[Fault, ...] = ()
    """New ones; a corrupt chunk is reported once."""
    moved: tuple[Moved, ...] = ()
    found: tuple[tuple[str, ChunkKey], ...] = ()
    """Known to be in a lower tier now, though nobody here wrote them."""
    gone: tuple[tuple[str, ChunkKey], ...] = ()
    """Known not to be in a lower tier, or to be bad there."""


@dataclass(slots=True)
class ChangesDraft:
    """Changes while reports are taken in."""

    arrived: list[tuple[str, ChunkKey]] = field(default_factory=list)
    written: list[tuple[str, ChunkKey]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    found: list[tuple[str, ChunkKey]] = field(default_factory=list)
    _gone: dict[tuple[str, ChunkKey], None] = field(default_factory=dict)

    def note_presence(
        self, tier: str, there: Iterable[ChunkKey], missing: Iterable[ChunkKey]
    ) -> None:
        """A report says what a tier has; what was said before is out of date."""
        self._gone |= dict.fromkeys((tier, key) for key in missing)
        for key in there:
            self._gone.pop((tier, key), None)

    def finished(self, lost: tuple[ChunkKey, ...], evicted: tuple[ChunkKey, ...]) -> Changes:
        """As they are told, with what promotions have lost and evicted."""
        return Changes(
            tuple(self.arrived),
            lost,
            evicted,
            tuple(self.written),
            tuple(self.faults),
            tuple(self.moved),
            tuple(self.found),
            tuple(self._gone),
        )
