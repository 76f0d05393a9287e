"""Host memory as a tier, on the scheduler side: which chunk rests where, who holds it, who leaves.

Bytes are with the ranks; this is the index of their arenas, which are all alike. A chunk is
ARRIVING from the reservation of its room until every rank has its bytes, then READY. What is
leased does not leave.

Ownership: every field belongs to the scheduler thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.core.lookups import ChunkLookup, LookupCodes
from kvstrata.core.spans import ceil_div
from kvstrata.tiers.room import PAGE_BYTES, Extent, Room

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import EvictionPolicy


@dataclass(slots=True)
class _Resident:
    """One chunk in the arenas."""

    extents: tuple[Extent, ...]
    num_bytes: int
    is_ready: bool = False
    num_leases: int = 0
    is_doomed: bool = False
    """Whether it leaves as soon as nobody holds it."""

    @property
    def num_pages(self) -> int:
        return sum(extent.num_pages for extent in self.extents)


class Reservation(NamedTuple):
    """What a request for room led to."""

    granted: dict[ChunkKey, tuple[Extent, ...]]
    """New room, to be filled and then settled."""
    known: frozenset[ChunkKey]
    """There already, or on the way: nothing to do."""
    refused: frozenset[ChunkKey]
    """No room could be made: everything else is leased, arriving, or asked for here."""
    evicted: tuple[ChunkKey, ...]
    """What left to make room."""


class HostMemoryIndex:
    """The index of all ranks' arenas.

    Args:
        capacity_bytes: of each arena.
        policy: who leaves first.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        self._room = Room(capacity_bytes)
        self._policy = policy
        self._residents: dict[ChunkKey, _Resident] = {}
        self._codes: dict[ChunkKey, int] = {}
        self._idle_pages = 0
        """Pages of READY chunks that nobody holds."""

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_arriving(self) -> int:
        """Chunks with room and without their bytes."""
        return sum(not resident.is_ready for resident in self._residents.values())

    @property
    def free_bytes(self) -> int:
        """Room that nobody has."""
        return self._room.free_pages * PAGE_BYTES

    @property
    def num_leases(self) -> int:
        """Holds on chunks."""
        return sum(resident.num_leases for resident in self._residents.values())

    def ready_keys(self) -> frozenset[ChunkKey]:
        """All READY chunks."""
        return frozenset(k for k, code in self._codes.items() if code == ChunkLookup.READY)

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """READY, ARRIVING or ABSENT for each key. Never blocks. Changes nothing."""
        get = self._codes.get
        return LookupCodes(bytes([get(key, 0) for key in keys]))

    def extents(self, key: ChunkKey) -> tuple[Extent, ...]:
        """Where a chunk rests.

        Raises:
            KeyError: it does not.
        """
        return self._residents[key].extents

    def reserve(
        self, keys: Sequence[ChunkKey], sizes: Sequence[int], keep: Collection[ChunkKey] = ()
    ) -> Reservation:
        """Take room for chunks, in the order of their tokens, evicting others for it.

        Stops at the first chunk that finds no room: a suffix is no use without its prefix. Neither
        these chunks nor those in `keep` are evicted, and none is if that would not be enough.
        """
        granted: dict[ChunkKey, tuple[Extent, ...]] = {}
        evicted: list[ChunkKey] = []
        wanted = dict(zip(keys, sizes, strict=True))
        known = frozenset(wanted.keys() & self._residents.keys())
        stays = known.union(key for key in keep if key in self._residents)
        for key, size in wanted.items():
            if key in known:
                continue
            extents = self._make_room(size, evicted, stays)
            if extents is None:
                break
            granted[key] = extents
            self._residents[key] = _Resident(extents, size)
            self._codes[key] = ChunkLookup.ARRIVING
        refused = frozenset(wanted) - known - granted.keys()
        return Reservation(granted, known, refused, tuple(evicted))

    def settle(self, stored: Iterable[ChunkKey], failed: Iterable[ChunkKey] = ()) -> None:
        """Reserved chunks have arrived on every rank, or will not: then their room is free again.

        Raises:
            KeyError: a chunk was not reserved.
        """
        arrived = list(stored)
        for key in arrived:
            self._residents[key].is_ready = True
            self._codes[key] = ChunkLookup.READY
            self._idle_pages += self._residents[key].num_pages
        self._policy.insert(arrived, [self._residents[key].num_bytes for key in arrived])
        for key in failed:
            self._drop(key)

    def abandon(self, keys: Iterable[ChunkKey]) -> None:
        """Reserved chunks will not arrive, but their memory may still be written to.

        They count as FAILED, and their room stays taken, until `settle` ends them.
        """
        for key in keys:
            self._codes[key] = ChunkLookup.FAILED

    def lease(self, keys: Sequence[ChunkKey]) -> None:
        """Hold READY chunks against eviction, and note their use.

        Raises:
            KeyError: a chunk is not READY; none is held then.
        """
        for key in keys:
            if self._codes.get(key) != ChunkLookup.READY:
                raise KeyError(key)
        for key in keys:
            resident = self._residents[key]
            self._idle_pages -= 0 if resident.num_leases else resident.num_pages
            resident.num_leases += 1
        self._policy.touch(keys)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """End leases."""
        for key in keys:
            resident = self._residents[key]
            assert resident.num_leases > 0, key
            resident.num_leases -= 1
            self._idle_pages += 0 if resident.num_leases else resident.num_pages
            if resident.is_doomed and not resident.num_leases:
                self._policy.remove([key])
                self._drop(key)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note a use of a whole chain, in the order of its tokens: prefixes stay longest."""
        self._policy.touch(keys)

    def remove(self, keys: Iterable[ChunkKey]) -> tuple[ChunkKey, ...]:
        """Drop READY chunks that nobody holds; returns those dropped."""
        unique = dict.fromkeys(keys)
        dropped = [key for key in unique if key in self._residents and self._may_leave(key)]
        self._policy.remove(dropped)
        for key in dropped:
            self._drop(key)
        return tuple(dropped)

    def clear(self) -> tuple[ChunkKey, ...]:
        """Forget every READY chunk: those in use leave when they are let go.

        Returns all of them. Chunks on their way are not concerned.
        """
        ready = [key for key, code in self._codes.items() if code == ChunkLookup.READY]
        self.remove(ready)
        for key in ready:
            if key in self._residents:
                self._residents[key].is_doomed = True
                self._codes[key] = ChunkLookup.FAILED
        return tuple(ready)

    def check_invariants(self) -> None:
        """Assert that room, residents and codes agree. For tests and idle moments."""
        self._room.check_invariants()
        taken = sorted(e for resident in self._residents.values() for e in resident.extents)
        for before, after in itertools.pairwise(taken):
            assert before.first_page + before.num_pages <= after.first_page, (before, after)
        pages = sum(extent.num_pages for extent in taken)
        assert pages + self._room.free_pages == self._room.num_pages
        assert self._codes.keys() == self._residents.keys()
        idle = [r for r in self._residents.values() if r.is_ready and not r.num_leases]
        assert self._idle_pages == sum(resident.num_pages for resident in idle)
        for key, resident in self._residents.items():
            on_the_way = (ChunkLookup.ARRIVING, ChunkLookup.FAILED)
            is_offered = resident.is_ready and not resident.is_doomed
            expected = (ChunkLookup.READY,) if is_offered else on_the_way
            assert self._codes[key] in expected
            assert resident.is_ready or not resident.num_leases

    def _make_room(
        self, num_bytes: int, evicted: list[ChunkKey], stays: Collection[ChunkKey]
    ) -> tuple[Extent, ...] | None:
        num_pages = ceil_div(num_bytes, PAGE_BYTES)
        if num_pages > self._room.free_pages + self._free_to_go(stays):
            return None
        while (extents := self._room.take(num_bytes)) is None:
            victim = self._policy.evict(lambda key: key not in stays and self._may_leave(key))
            if victim is None:
                return None
            evicted.append(victim)
            left = self._forget(victim)
            if [extent.num_pages for extent in left] == [num_pages]:
                return left  # what a full arena of equal chunks does all the time
            self._room.give_back(left)
        return extents

    def _free_to_go(self, stays: Collection[ChunkKey]) -> int:
        """Pages of READY chunks that nobody holds, but for those that stay."""
        if not stays:
            return self._idle_pages
        staying = (self._residents[key] for key in stays if self._may_leave(key))
        return self._idle_pages - sum(resident.num_pages for resident in staying)

    def _may_leave(self, key: ChunkKey) -> bool:
        resident = self._residents[key]
        return resident.is_ready and not resident.num_leases

    def _drop(self, key: ChunkKey) -> None:
        self._room.give_back(self._forget(key))

    def _forget(self, key: ChunkKey) -> tuple[Extent, ...]:
        """Take a chunk out of the index; its room."""
        resident = self._residents.pop(key)
        self._idle_pages -= resident.num_pages if resident.is_ready else 0
        del self._codes[key]
        return resident.extents
