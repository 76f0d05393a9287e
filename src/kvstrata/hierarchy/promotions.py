"""Chunks on their way up into host memory.

Each is read from the best tier that has it, and from the next best when that fails, until its
deadline. A chunk that a hung medium may still be writing to is lost for the request, but its room
stays taken until the medium lets go.

Ownership: everything belongs to the scheduler thread.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata.core.outcomes import Deadline
from kvstrata.errors import ChunkCorrupt
from kvstrata.hierarchy.breaker import BreakerState
from kvstrata.hierarchy.lower_tier import best_tier
from kvstrata.hierarchy.ranks import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.hierarchy.lower_tier import LowerTier
    from kvstrata.hierarchy.ranks import TierReport
    from kvstrata.tiers.host_memory import HostMemoryIndex


@dataclass(slots=True)
class _Promotion:
    """A chunk on its way up."""

    placed: Placed
    deadline: Deadline
    tried: set[str] = field(default_factory=set)


class Promotions:
    """All promotions under way.

    Args:
        host: where chunks go.
        tiers: where they come from.
        clock: monotonic seconds.
    """

    def __init__(
        self, host: HostMemoryIndex, tiers: Sequence[LowerTier], clock: Callable[[], float]
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._clock = clock
        self._under_way: dict[ChunkKey, _Promotion] = {}
        self._evicted: list[ChunkKey] = []
        self._lost: list[ChunkKey] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, labels: Sequence[ChunkLabel], deadline: Deadline) -> None:
        """Bring chunks up, in the order of their tokens, as far as there is room.

        What is in host memory, on its way, or in no tier is left alone; what finds no room is
        lost at once. None of them leaves host memory for the others.
        """
        by_key = {label.key: label for label in labels}
        wanted = [label for label in by_key.values() if best_tier(self._tiers, label.key)]
        sizes = {label.key: label.payload_bytes for label in wanted}
        room = self._host.reserve(list(sizes), list(sizes.values()), keep=by_key)
        self._evicted.extend(room.evicted)
        self._lost.extend(room.refused)
        for key, extents in room.granted.items():
            self._under_way[key] = _Promotion(Placed(by_key[key], extents), deadline)
        self._read(room.granted)

    def ended(self, tier: LowerTier, report: TierReport) -> dict[ChunkKey, int]:
        """Apply the report of a read; the chunks that are READY now, with their sizes."""
        if report.released:
            self._released(report.released)
            return {}
        outcome = report.outcome
        self._learn(tier, report)
        arrived = {
            key: promotion.placed.label.payload_bytes
            for key, promotion in self._under_way.items()
            if key in outcome.done
        }
        for key in arrived:
            del self._under_way[key]
        self._host.settle(arrived)
        missing = outcome.absent | outcome.failed.keys()
        again = [key for key in self._under_way if key in missing]
        for key in again:
            self._under_way[key].tried.add(tier.name)
        held = [key for key in again if key in report.held]
        self._host.abandon(held)
        self._lost.extend(held)
        self._read([key for key in again if key not in report.held])
        return arrived

    def take_evicted(self) -> tuple[ChunkKey, ...]:
        """Hand over what left host memory to make room."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def take_lost(self) -> tuple[ChunkKey, ...]:
        """Hand over the chunks that could not be brought up."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def _read(self, keys: Iterable[ChunkKey]) -> None:
        """Start to read chunks, each from its best tier; give up those that have none."""
        batches: dict[str, list[_Promotion]] = defaultdict(list)
        for key in keys:
            promotion = self._under_way[key]
            tier = best_tier(self._tiers, key, promotion.tried)
            if tier is None or self._clock() > promotion.deadline:
                self._give_up(key)
            else:
                batches[tier.name].append(promotion)
        for tier in self._tiers:
            if batch := self._batch(tier, batches[tier.name]):
                deadline = Deadline(min(promotion.deadline for promotion in batch))
                tier.read([promotion.placed for promotion in batch], deadline)

    def _batch(self, tier: LowerTier, batch: list[_Promotion]) -> list[_Promotion]:
        """What to read from a tier at once: of one that was broken a single chunk, as a probe."""
        if tier.breaker.state is BreakerState.CLOSED:
            return batch
        for promotion in batch[1:]:
            self._give_up(promotion.placed.label.key)
        return batch[:1]

    def _learn(self, tier: LowerTier, report: TierReport) -> None:
        outcome = report.outcome
        tier.known.missed(outcome.absent)
        tier.known.spoiled(k for k, e in outcome.failed.items() if isinstance(e, ChunkCorrupt))
        if outcome.done and not outcome.failed:
            labels = [self._under_way[key].placed.label for key in outcome.done]
            tier.measure(sum(label.payload_bytes for label in labels), report.seconds)

    def _released(self, keys: Iterable[ChunkKey]) -> None:
        """A hung medium let go of memory: the room is free at last."""
        for key in keys:
            del self._under_way[key]
            self._host.settle((), [key])

    def _give_up(self, key: ChunkKey) -> None:
        del self._under_way[key]
        self._host.settle((), [key])
        self._lost.append(key)
