"""What is in a store, from names and a few header pages."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstrata.core.ids import key_group
from kvstrata.operations.checking import check_header_at
from kvstrata.operations.listing import Totals, no_progress
from kvstrata.tiers.chunk_format import HEADER_BYTES, BadChunk, parse_header

if TYPE_CHECKING:
    from kvstrata.core.chunk_label import Rank
    from kvstrata.core.ids import ChunkKey, GroupId
    from kvstrata.core.layout import GroupKind
    from kvstrata.operations.listing import (
        ChunkName,
        Housekeeping,
        OnProgress,
        Place,
        StoreListing,
    )
    from kvstrata.tiers.chunk_format import ChunkHeader

_SAMPLES: Final = 4
"""Header pages tried for each group: all chunks of a group are of one kind, but some may be bad."""
_PROGRESS_STEP: Final = 1000


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of a namespace."""

    group_id: GroupId
    files: Totals
    kind: GroupKind | None
    """None: no header of the sample could be read."""
    block_tokens: int | None
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace."""

    fingerprint: str
    files: Totals
    num_chunks: int
    num_complete: int
    """Chunks of which every rank's part is there."""
    ranks: tuple[Rank, ...]
    groups: tuple[GroupSummary, ...]
    oldest_use_ns: int | None
    newest_use_ns: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """A whole store."""

    address: str
    medium: str
    namespaces: tuple[NamespaceSummary, ...]
    strays: Totals
    """Files that lie among the chunks under names that are no chunk's."""
    housekeeping: Housekeeping

    @property
    def total_bytes(self) -> int:
        """All bytes in the store."""
        kept = [self.strays, self.housekeeping.temporary, self.housekeeping.quarantined]
        return sum(part.num_bytes for part in [*kept, *(n.files for n in self.namespaces)])


def inspect(listing: StoreListing, on_progress: OnProgress = no_progress) -> Inspection:
    """List a store and read a few header pages. Changes nothing.

    Raises:
        TierUnavailable: the store cannot be listed.
    """
    tallies: dict[str, _Tally] = {}
    strays: list[int] = []
    for number, place in enumerate(listing.places(), 1):
        if place.chunk is None:
            strays.append(place.num_bytes)
        else:
            tallies.setdefault(place.namespace, _Tally()).add(place, place.chunk)
        if number % _PROGRESS_STEP == 0:
            on_progress(number, None)
    return Inspection(
        address=listing.address,
        medium=listing.medium,
        namespaces=tuple(tallies[name].summary(name, listing) for name in sorted(tallies)),
        strays=Totals.of(strays),
        housekeeping=listing.housekeeping(),
    )


@dataclass(slots=True)
class _GroupTally:
    sizes: list[int] = field(default_factory=list)
    samples: list[Place] = field(default_factory=list)

    def add(self, place: Place) -> None:
        self.sizes.append(place.num_bytes)
        if len(self.samples) < _SAMPLES:
            self.samples.append(place)

    def summary(self, group_id: GroupId, listing: StoreListing) -> GroupSummary:
        headers = (read_header(listing, place) for place in self.samples)
        header = next((found for found in headers if found is not None), None)
        return GroupSummary(
            group_id=group_id,
            files=Totals.of(self.sizes),
            kind=header.kind if header else None,
            block_tokens=header.block_tokens if header else None,
            chunk_tokens=header.last_token - header.first_token if header else None,
        )


@dataclass(slots=True)
class _Tally:
    """A namespace being counted."""

    ranks_of: dict[tuple[ChunkKey, int], int] = field(default_factory=lambda: defaultdict(int))
    """For each chunk and number of ranks: how many of them have their part."""
    ranks: set[Rank] = field(default_factory=set)
    groups: dict[GroupId, _GroupTally] = field(default_factory=lambda: defaultdict(_GroupTally))
    uses_ns: list[int] = field(default_factory=list)
    """The oldest and the newest."""

    def add(self, place: Place, chunk: ChunkName) -> None:
        self.ranks_of[chunk.key, chunk.rank.count] += 1
        self.ranks.add(chunk.rank)
        self.groups[key_group(chunk.key)].add(place)
        if place.used_ns is not None:
            known = [*self.uses_ns, place.used_ns]
            self.uses_ns = [min(known), max(known)]

    def summary(self, fingerprint: str, listing: StoreListing) -> NamespaceSummary:
        groups = tuple(self.groups[group].summary(group, listing) for group in sorted(self.groups))
        return NamespaceSummary(
            fingerprint=fingerprint,
            files=Totals.of(size for tally in self.groups.values() for size in tally.sizes),
            num_chunks=len(self.ranks_of),
            num_complete=sum(there == count for (_, count), there in self.ranks_of.items()),
            ranks=tuple(sorted(self.ranks, key=lambda rank: (rank.count, rank.index))),
            groups=groups,
            oldest_use_ns=self.uses_ns[0] if self.uses_ns else None,
            newest_use_ns=self.uses_ns[-1] if self.uses_ns else None,
        )


def read_header(listing: StoreListing, place: Place) -> ChunkHeader | None:
    """A chunk's header; None: it cannot be read, or belongs elsewhere."""
    try:
        with closing(listing.read(place, HEADER_BYTES)) as pieces:
            header = parse_header(next(pieces, memoryview(b"")))
        check_header_at(header, place)
    except (BadChunk, OSError):
        return None
    return header
