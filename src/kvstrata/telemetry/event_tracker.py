"""Which chunks rest in which tier, and the events that say so.

A chunk is described while its request is alive, because a key tells neither tokens nor parents.
Residencies are told as they begin and end, in any order with descriptions. What is announced is the
difference between what rests in a tier now and what was announced before: a chunk that came and
went between two takes makes no event, and what nobody takes never piles up.

Chunks that share hashes announce them once each, and take them back once each: readers count.

Ownership: everything belongs to the scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata.config.schema import ObjectStoreTierConfig, ValkeyTierConfig, tier_name
from kvstrata.telemetry.chunk_description import ChunkDescription, Describer, Place
from kvstrata.telemetry.kv_events import (
    LOCAL,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    REMOTE,
    as_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstrata.config.schema import Config
    from kvstrata.core.chunk_grid import ChunkGrid
    from kvstrata.core.ids import ChunkKey, GroupId
    from kvstrata.telemetry.kv_events import BlockRemoved, BlockStored, ExternalHash, KVEvent

HOST: Final = "host"
"""The name of the tier in host memory."""


class EventsTracker(Protocol):
    """Told what happens to chunks. Scheduler thread only, never blocks."""

    is_on: bool
    """Whether anything is announced; what would only be told may be left out then."""

    def describe(
        self,
        grid: ChunkGrid,
        group_id: GroupId,
        index: int,
        *,
        tokens: Sequence[int],
        lora: str | None,
    ) -> None:
        """Note what a chunk would announce; does nothing if the key is described already.

        To be called when a store or a promotion of the chunk starts, and again at any hit: a chunk
        that rests somewhere undescribed is announced from then on.

        Raises:
            ValueError: the tokens end before the chunk does, or do not fit 32 bits.
        """
        ...

    def stored(self, key: ChunkKey, tier: str) -> None:
        """A chunk rests in a tier, on every rank. Does nothing on successive calls."""
        ...

    def removed(self, key: ChunkKey, tier: str) -> None:
        """A chunk left a tier. Does nothing if it was not known to be there."""
        ...

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Drop the descriptions of chunks that rest nowhere.

        To be called when a request has ended and its stores have settled. A description dropped too
        early costs an announcement until the chunk is described again; it never makes a wrong one.
        """
        ...

    def clear(self, tier: str | None = None) -> None:
        """Everything left a tier; None: left all tiers."""
        ...

    def announce_again(self) -> None:
        """Announce everything anew at the next take, as readers know nothing any more.

        To be called with an AllBlocksCleared in the stream ahead of the next take: without one,
        readers would count every chunk twice.
        """
        ...

    def take_events(self) -> list[KVEvent]:
        """Hand over what has changed since the last call; removals come first."""
        ...

    def residencies(self, tier: str) -> frozenset[ChunkKey]:
        """The chunks known to rest in a tier, announced or not."""
        ...

    def check_invariants(self) -> None:
        """Assert that descriptions, residencies and announcements agree."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerLimits:
    """How much a tracker remembers."""

    max_residencies: int = 1_000_000
    """Over all tiers. Further ones are not announced; it is safe to know of fewer."""
    max_waiting: int = 100_000
    """Descriptions of chunks that rest nowhere yet; the oldest is dropped for a new one."""


@dataclass(slots=True)
class _TierContents:
    """One tier, as it is and as it was announced."""

    place: Place
    resident: set[ChunkKey] = field(default_factory=set)
    announced: set[ChunkKey] = field(default_factory=set)
    changed: dict[ChunkKey, None] = field(default_factory=dict)
    """Where the two may differ, in the order of change."""

    def holds(self, key: ChunkKey) -> bool:
        """Whether the chunk is here, or is still announced to be."""
        return key in self.resident or key in self.announced


class OffloadingEventsTracker:
    """Announces chunks of every group in every tier.

    Args:
        localities: LOCAL or REMOTE by tier, where known; host memory is LOCAL.
        external_hash: how a hash is shown on the wire.
        limits: how much is remembered.
    """

    is_on = True

    def __init__(
        self,
        localities: Mapping[str, str] | None = None,
        external_hash: Callable[[bytes], ExternalHash] = as_bytes,
        limits: TrackerLimits | None = None,
    ) -> None:
        self.num_refused = 0
        """Residencies not followed because there were too many."""
        self._localities = {HOST: LOCAL, **(localities or {})}
        self._describer = Describer(external_hash)
        self._limits = limits or TrackerLimits()
        self._descriptions: dict[ChunkKey, ChunkDescription] = {}
        self._waiting: dict[ChunkKey, None] = {}
        self._tiers: dict[str, _TierContents] = {}
        self._num_residencies = 0

    def describe(
        self,
        grid: ChunkGrid,
        group_id: GroupId,
        index: int,
        *,
        tokens: Sequence[int],
        lora: str | None,
    ) -> None:
        """See `EventsTracker`."""
        key = grid.key(group_id, index)
        if key in self._descriptions:
            return
        self._descriptions[key] = self._describer.describe(
            grid, group_id, index, tokens=tokens, lora=lora
        )
        holders = [tier for tier in self._tiers.values() if key in tier.resident]
        for tier in holders:
            tier.changed[key] = None
        if not holders:
            self._wait(key)

    def stored(self, key: ChunkKey, tier: str) -> None:
        """See `EventsTracker`."""
        contents = self._contents(tier)
        if key in contents.resident:
            return
        if self._num_residencies >= self._limits.max_residencies:
            self.num_refused += 1
            return
        self._num_residencies += 1
        contents.resident.add(key)
        contents.changed[key] = None
        self._waiting.pop(key, None)

    def removed(self, key: ChunkKey, tier: str) -> None:
        """See `EventsTracker`."""
        contents = self._contents(tier)
        if key not in contents.resident:
            return
        self._num_residencies -= 1
        contents.resident.remove(key)
        if key in contents.announced:
            contents.changed[key] = None
            return
        contents.changed.pop(key, None)
        self._let_go(key)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """See `EventsTracker`."""
        for key in keys:
            if key in self._waiting:
                del self._waiting[key], self._descriptions[key]

    def clear(self, tier: str | None = None) -> None:
        """See `EventsTracker`."""
        for name in self._tiers if tier is None else (tier,):
            for key in self.residencies(name):
                self.removed(key, name)

    def announce_again(self) -> None:
        """See `EventsTracker`."""
        for contents in self._tiers.values():
            gone = contents.announced - contents.resident
            contents.announced.clear()
            contents.changed = dict.fromkeys(contents.resident)
            for key in gone:
                self._let_go(key)

    def take_events(self) -> list[KVEvent]:
        """See `EventsTracker`."""
        # A reader that does not count loses a hash shared by two chunks if the new one is announced
        # before the old one is taken back.
        changed = [contents for contents in self._tiers.values() if contents.changed]
        events: list[KVEvent] = []
        for contents in changed:
            events.extend(self._removals(contents))
        for contents in changed:
            events.extend(self._stores(contents))
            contents.changed.clear()
        return events

    def residencies(self, tier: str) -> frozenset[ChunkKey]:
        """See `EventsTracker`."""
        contents = self._tiers.get(tier)
        return frozenset(contents.resident) if contents else frozenset()

    def check_invariants(self) -> None:
        """See `EventsTracker`."""
        tiers = self._tiers.values()
        assert self._num_residencies == sum(len(tier.resident) for tier in tiers)
        assert self._num_residencies <= self._limits.max_residencies
        assert len(self._waiting) <= self._limits.max_waiting
        for key in self._descriptions:
            assert (key in self._waiting) != self._is_held(key)
        for tier in tiers:
            assert tier.announced <= self._descriptions.keys()
            differing = (tier.resident & self._descriptions.keys()) ^ tier.announced
            assert differing <= tier.changed.keys()

    def _contents(self, tier: str) -> _TierContents:
        contents = self._tiers.get(tier)
        if contents is None:
            medium = MEDIUM_CPU if tier == HOST else MEDIUM_STORAGE
            contents = _TierContents(Place(medium, self._localities.get(tier), tier))
            self._tiers[tier] = contents
        return contents

    def _removals(self, contents: _TierContents) -> Iterator[BlockRemoved]:
        for key in contents.changed:
            if key in contents.announced and key not in contents.resident:
                yield self._descriptions[key].removed(contents.place)
                contents.announced.remove(key)
                self._let_go(key)

    def _stores(self, contents: _TierContents) -> Iterator[BlockStored]:
        for key in contents.changed:
            if key in contents.announced or key not in contents.resident:
                continue
            description = self._descriptions.get(key)
            if description is not None:
                yield description.stored(contents.place)
                contents.announced.add(key)

    def _is_held(self, key: ChunkKey) -> bool:
        return any(contents.holds(key) for contents in self._tiers.values())

    def _let_go(self, key: ChunkKey) -> None:
        """The chunk may be on its way back: its description waits with the others."""
        if not self._is_held(key) and key in self._descriptions:
            self._wait(key)

    def _wait(self, key: ChunkKey) -> None:
        if len(self._waiting) >= self._limits.max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest], self._descriptions[oldest]
        self._waiting[key] = None


class NullTracker:
    """Announces nothing and remembers nothing."""

    is_on = False

    def describe(
        self,
        grid: ChunkGrid,
        group_id: GroupId,
        index: int,
        *,
        tokens: Sequence[int],
        lora: str | None,
    ) -> None:
        """Does nothing."""

    def stored(self, key: ChunkKey, tier: str) -> None:
        """Does nothing."""

    def removed(self, key: ChunkKey, tier: str) -> None:
        """Does nothing."""

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Does nothing."""

    def clear(self, tier: str | None = None) -> None:
        """Does nothing."""

    def announce_again(self) -> None:
        """Does nothing."""

    def take_events(self) -> list[KVEvent]:
        """There are none."""
        return []

    def residencies(self, tier: str) -> frozenset[ChunkKey]:  # noqa: ARG002 - none in any
        """There are none."""
        return frozenset()

    def check_invariants(self) -> None:
        """Holds."""


def make_tracker(
    config: Config, external_hash: Callable[[bytes], ExternalHash] = as_bytes
) -> EventsTracker:
    """The tracker that a configuration asks for."""
    if not config.events.self_describing:
        return NullTracker()
    return OffloadingEventsTracker(tier_localities(config), external_hash)


def tier_localities(config: Config) -> dict[str, str]:
    """Which tiers are known to be elsewhere; a directory may be local or shared."""
    servers = ObjectStoreTierConfig | ValkeyTierConfig
    return {tier_name(tier): REMOTE for tier in config.tiers if isinstance(tier, servers)}
