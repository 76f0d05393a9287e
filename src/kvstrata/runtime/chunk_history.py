"""What became of chunks that are gone, to explain misses. Bounded; the oldest is forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey

MOST_REMEMBERED: Final = 100_000


class Departure(NamedTuple):
    """A chunk that left host memory."""

    at: float
    tiers: tuple[str, ...]
    """The lower tiers that had it then."""


class ChunkHistory:
    """Departures by key.

    Ownership: scheduler thread only.

    Args:
        clock: monotonic seconds.
        tier_names: all lower tiers.
    """

    def __init__(self, clock: Callable[[], float], tier_names: Sequence[str]) -> None:
        self._clock = clock
        self._tier_names = tuple(tier_names)
        self._departures: OrderedDict[ChunkKey, Departure] = OrderedDict()

    def left(
        self, keys: Iterable[ChunkKey], tiers_with: Callable[[ChunkKey], tuple[str, ...]]
    ) -> None:
        """These left host memory."""
        now = self._clock()
        for key in keys:
            self._departures[key] = Departure(now, tiers_with(key))
            self._departures.move_to_end(key)
        while len(self._departures) > MOST_REMEMBERED:
            self._departures.popitem(last=False)

    def tell(self, key: ChunkKey) -> str:
        """What is known about a chunk that is not there, in words."""
        departure = self._departures.get(key)
        if departure is None:
            return "never stored here, or long ago"
        ago = f"evicted {self._clock() - departure.at:.0f} s ago from host"
        missing = [name for name in self._tier_names if name not in departure.tiers]
        facts = [ago, *(f"never written to {name}" for name in missing)]
        return ", ".join([*facts, *(f"was then in {name}" for name in departure.tiers)])
