"""One tier below host memory, with all that is known about it, and the choice between several.

Ownership: everything belongs to the scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.lookups import ChunkLookup
from kvstrata.errors import ChunkCorrupt, TierFull
from kvstrata.hierarchy.known_chunks import KnownChunks, Presence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.errors import TierError
    from kvstrata.hierarchy.breaker import Breaker, Ticket
    from kvstrata.hierarchy.ranks import Placed, RankedTier, TierReport

_SMOOTHING: Final = 0.2
"""Weight of the newest measurement in a tier's speed."""


class Fault(NamedTuple):
    """Something a tier got wrong, for logs and metrics."""

    tier: str
    error: TierError


@dataclass(slots=True)
class LowerTier:
    """One tier below host memory."""

    name: str
    ranks: RankedTier
    breaker: Breaker
    known: KnownChunks
    weight: float = 1.0
    """Preference over other tiers that have a chunk."""
    max_waiting_bytes: int = 256 * 2**20
    """Writes that would make more wait are dropped."""
    bytes_per_s: float = 0.0
    """Measured on reads; zero until the first."""
    _tickets: dict[int, Ticket] = field(default_factory=dict)

    @property
    def worth(self) -> float:
        """How much reading from here is preferred."""
        return self.weight * (self.bytes_per_s or 1.0)

    def has(self, key: ChunkKey) -> bool:
        """Whether the tier is known to have a chunk."""
        return self.known.presence(key) is Presence.PRESENT

    def measure(self, num_bytes: int, seconds: float) -> None:
        """Take a read of so many bytes into the tier's speed."""
        speed = num_bytes / max(seconds, 1e-9)
        old = self.bytes_per_s or speed
        self.bytes_per_s = (1 - _SMOOTHING) * old + _SMOOTHING * speed

    def read(self, chunks: Sequence[Placed], deadline: Deadline) -> int:
        """Start to read chunks into the arenas; returns the job."""
        return self._started(self.ranks.read(chunks, deadline))

    def write(self, chunks: Sequence[Placed], deadline: Deadline) -> int:
        """Start to write chunks from the arenas; returns the job."""
        return self._started(self.ranks.write(chunks, deadline))

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> int:
        """Start to ask about keys; returns the job."""
        return self._started(self.ranks.find(keys, deadline))

    def judge(self, report: TierReport) -> list[Fault]:
        """Tell the breaker how a job ended; the faults that it had, each once.

        A corrupt chunk, a full tier or a deadline too short says nothing about the tier's health.
        """
        ticket = self._tickets.pop(report.job_id)
        failed = report.outcome.failed
        if any(key not in report.hurried and _is_blame(failed[key]) for key in failed):
            self.breaker.failed(ticket)
        elif report.hurried and not report.outcome.done:
            self.breaker.undecided(ticket)
        else:
            self.breaker.succeeded(ticket, report.slowest_s)
        errors = {id(error): error for error in failed.values()}
        return [Fault(self.name, error) for error in errors.values()]

    def _started(self, job_id: int) -> int:
        self._tickets[job_id] = self.breaker.started()
        return job_id


def _is_blame(error: TierError) -> bool:
    return not isinstance(error, ChunkCorrupt | TierFull)


def standing(tiers: Iterable[LowerTier], key: ChunkKey) -> ChunkLookup:
    """A key's standing over all lower tiers that may be used now."""
    states = {tier.known.presence(key) for tier in tiers if tier.breaker.allows()}
    if Presence.PRESENT in states:
        return ChunkLookup.ARRIVING
    if states & {Presence.UNKNOWN, Presence.ASKED}:
        return ChunkLookup.UNKNOWN
    return ChunkLookup.FAILED if Presence.BAD in states else ChunkLookup.ABSENT


def best_tier(
    tiers: Iterable[LowerTier], key: ChunkKey, tried: Collection[str] = ()
) -> LowerTier | None:
    """The tier to read a chunk from: of those that have it the one worth most, then the first."""
    able = [t for t in tiers if t.name not in tried and t.has(key) and t.breaker.allows()]
    return max(able, key=lambda tier: tier.worth, default=None)
