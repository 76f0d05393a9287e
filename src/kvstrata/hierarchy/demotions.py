"""Chunks on their way down from host memory, in the background.

A tier takes a write only while few bytes wait for it; else the write is dropped, because loads must
not wait behind stores. A chunk is leased until the tier has let go of its memory.

Ownership: everything belongs to the scheduler thread.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstrata.core.lookups import ChunkLookup
from kvstrata.core.outcomes import Deadline
from kvstrata.hierarchy.breaker import BreakerState
from kvstrata.hierarchy.ranks import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.hierarchy.lower_tier import LowerTier
    from kvstrata.hierarchy.ranks import TierReport
    from kvstrata.tiers.host_memory import HostMemoryIndex


class Demotions:
    """All demotions under way.

    Args:
        host: where chunks come from.
        clock: monotonic seconds.
        limit_s: how long one write may take.
    """

    def __init__(self, host: HostMemoryIndex, clock: Callable[[], float], limit_s: float) -> None:
        self._host = host
        self._clock = clock
        self._limit_s = limit_s
        self._jobs: dict[tuple[str, int], dict[ChunkKey, int]] = {}
        self._writing: set[tuple[str, ChunkKey]] = set()
        self._waiting_bytes: Counter[str] = Counter()
        self.num_dropped: Counter[str] = Counter()
        """Writes not taken because too many waited, by tier."""

    def __len__(self) -> int:
        return len(self._jobs)

    def is_writing(self, tier: LowerTier, key: ChunkKey) -> bool:
        """Whether a chunk is on its way into a tier."""
        return (tier.name, key) in self._writing

    def start(self, tier: LowerTier, labels: Sequence[ChunkLabel]) -> None:
        """Write those chunks to a tier that are READY, that it lacks, and that it takes now."""
        by_key = {label.key: label for label in labels}
        due = [label for label in by_key.values() if self._is_due(tier, label)]
        if tier.breaker.state is not BreakerState.CLOSED:
            due = due[:1]  # a probe
        taken = [label for label in due if self._fits(tier, label)]
        if not taken:
            return
        self._host.lease([label.key for label in taken])
        chunks = [Placed(label, self._host.extents(label.key)) for label in taken]
        job_id = tier.write(chunks, Deadline(self._clock() + self._limit_s))
        self._jobs[tier.name, job_id] = {label.key: label.payload_bytes for label in taken}
        self._writing |= {(tier.name, label.key) for label in taken}

    def ended(self, tier: LowerTier, report: TierReport) -> dict[ChunkKey, int]:
        """Apply the report of a write; the chunks that the tier has now, with their sizes."""
        if report.released:
            self._host.release(report.released)
            return {}
        sizes = self._jobs.pop((tier.name, report.job_id))
        self._waiting_bytes[tier.name] -= sum(sizes.values())
        self._writing -= {(tier.name, key) for key in sizes}
        tier.known.found(report.outcome.done)
        self._host.release([key for key in sizes if key not in report.held])
        return {key: size for key, size in sizes.items() if key in report.outcome.done}

    def _is_due(self, tier: LowerTier, label: ChunkLabel) -> bool:
        if tier.has(label.key) or (tier.name, label.key) in self._writing:
            return False
        is_ready = self._host.lookup([label.key])[0] == ChunkLookup.READY
        return is_ready and tier.breaker.allows()

    def _fits(self, tier: LowerTier, label: ChunkLabel) -> bool:
        """Whether the write may wait; then its bytes are counted."""
        if self._waiting_bytes[tier.name] + label.payload_bytes > tier.max_waiting_bytes:
            self.num_dropped[tier.name] += 1
            return False
        self._waiting_bytes[tier.name] += label.payload_bytes
        return True
