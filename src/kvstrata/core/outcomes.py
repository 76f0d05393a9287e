"""How a batch of reads, writes or questions to a tier ended: a fact for every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstrata.core.ids import ChunkKey
    from kvstrata.errors import TierError

Deadline = NewType("Deadline", float)
"""A moment on the monotonic clock, in seconds; nobody waits past it."""


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """Every key that was asked about stands in exactly one of the three."""

    done: frozenset[ChunkKey] = frozenset()
    """Read and verified, written, removed, or found."""
    absent: frozenset[ChunkKey] = frozenset()
    """Not there: a miss is a value."""
    failed: Mapping[ChunkKey, TierError] = field(default_factory=lambda: MappingProxyType({}))
    """Concerned by a fault, with the fault."""

    @classmethod
    def all_failed(cls, keys: Iterable[ChunkKey], error: TierError) -> TierOutcome:
        """One fault that concerned the whole batch."""
        return cls(failed=dict.fromkeys(keys, error))

    def merged(self, other: TierOutcome) -> TierOutcome:
        """Both outcomes as one; their keys are different."""
        return TierOutcome(
            self.done | other.done, self.absent | other.absent, {**self.failed, **other.failed}
        )
