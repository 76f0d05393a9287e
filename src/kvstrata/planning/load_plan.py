"""The longest prefix that every group can serve, and why it is not longer.

The search starts at the longest length that could be served if nothing were missing and asks the
groups in turn to lower it to the next length valid for them, until all agree. Each group jumps, so
the number of rounds depends on how the groups disagree, not on the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.layout import GroupKind
from kvstrata.core.lookups import ChunkLookup, all_ready, has_pending, once_arrived
from kvstrata.core.spans import ChunkSpan, TokenSpan, floor_to
from kvstrata.planning.group_rules import GroupRule, needed_chunks, rule_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.core.ids import GroupId
    from kvstrata.core.lookups import GroupLookups


_LOOKUPS: Final = tuple(ChunkLookup)
"""By their values."""


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """How much of a request may come from the cache.

    Raises:
        ValueError: the local hit leaves no token to compute.
    """

    num_tokens: int
    """Tokens the request has."""
    local_tokens: int = 0
    """Tokens every group has on the device already."""
    max_tokens: int | None = None
    """An upper limit for the whole hit; None: all but the last token, which is always computed."""

    def __post_init__(self) -> None:
        if not 0 <= self.local_tokens < max(1, self.num_tokens):
            raise ValueError(
                f"local_tokens {self.local_tokens} must leave one of num_tokens "
                f"{self.num_tokens} to compute"
            )

    @property
    def longest(self) -> int:
        """No hit is longer."""
        limit = max(self.local_tokens, self.num_tokens - 1)
        return limit if self.max_tokens is None else min(limit, self.max_tokens)


class GroupLoad(NamedTuple):
    """What to load for one group: these tokens, out of these chunks."""

    group_id: GroupId
    chunks: ChunkSpan
    tokens: TokenSpan


class Obstacle(NamedTuple):
    """Why a longer hit was not possible: one group, one chunk."""

    group_id: GroupId
    kind: GroupKind
    chunk: int
    tokens: TokenSpan
    """What the chunk covers; a recurrent state is taken at their end."""
    lookup: ChunkLookup
    wanted_tokens: int
    """The hit that the chunk prevented."""

    def __str__(self) -> str:
        what = (
            f"state at {self.tokens.stop}"
            if self.kind is GroupKind.RECURRENT
            else f"chunk {self.chunk} {self.tokens}"
        )
        return (
            f"{self.kind} group {self.group_id}: {what} is {self.lookup.name.lower()}, "
            f"needed for {self.wanted_tokens} tokens"
        )


class LoadPlan(NamedTuple):
    """One usable length with everything needed to load it."""

    num_tokens: int
    """The usable length, local tokens included."""
    local_tokens: int
    possible_tokens: int
    """The usable length if no chunk were missing."""
    awaited_tokens: int
    """The usable length once everything under way has arrived: worth waiting for if longer."""
    loads: tuple[GroupLoad, ...]
    obstacles: tuple[Obstacle, ...]
    """For each group that shortened the hit, the last chunk that did; the binding one is last."""

    @property
    def external_tokens(self) -> int:
        """Tokens to be loaded beyond the local hit."""
        return self.num_tokens - self.local_tokens


def choose_load(geometry: ChunkGeometry, lookups: GroupLookups, bounds: LoadBounds) -> LoadPlan:
    """Choose the longest hit that is valid in every group. Changes nothing.

    Args:
        geometry: the engine's chunks.
        lookups: what the tiers say about the request's chunks, by group.
        bounds: the request's length, its local hit and its limit.
    """
    search = _Search(geometry, lookups, bounds)
    possible = search.possible()
    obstacles: dict[GroupId, Obstacle] = {}

    def note(rule: GroupRule, length: int) -> None:
        if obstacle := _obstacle(rule, lookups, length):
            obstacles.pop(obstacle.group_id, None)
            obstacles[obstacle.group_id] = obstacle

    length = search.fit(search.rules, possible, note)
    return LoadPlan(
        num_tokens=length,
        local_tokens=bounds.local_tokens,
        possible_tokens=possible,
        awaited_tokens=search.awaited(length, possible),
        loads=search.loads(length),
        obstacles=tuple(obstacles.values()),
    )


def usable_lengths(
    geometry: ChunkGeometry, lookups: GroupLookups, bounds: LoadBounds
) -> Iterator[int]:
    """Every usable length above the local hit, longest first. Changes nothing."""
    search = _Search(geometry, lookups, bounds)
    length = search.fit(search.rules, bounds.longest)
    while length > bounds.local_tokens:
        yield length
        length = search.fit(search.rules, length - 1)


def _note_nothing(rule: GroupRule, length: int) -> None:
    """For searches whose obstacles nobody asked for."""


class _Search:
    """One request's rules, built once and asked several times."""

    def __init__(self, geometry: ChunkGeometry, lookups: GroupLookups, bounds: LoadBounds) -> None:
        self._geometry = geometry
        self._lookups = lookups
        self._bounds = bounds
        self._stride = geometry.layout.hit_stride_tokens
        self.rules = self._rules(lookups)

    def possible(self) -> int:
        """The length that a cache with every chunk would serve."""
        complete = tuple(all_ready(len(codes)) for codes in self._lookups)
        return self.fit(self._rules(complete), self._bounds.longest)

    def awaited(self, length: int, possible: int) -> int:
        """The length once everything under way has arrived."""
        if length == possible or not any(map(has_pending, self._lookups)):
            return length
        return self.fit(self._rules(tuple(map(once_arrived, self._lookups))), possible)

    def fit(
        self,
        rules: Sequence[GroupRule],
        length: int,
        note: Callable[[GroupRule, int], None] = _note_nothing,
    ) -> int:
        """The longest length up to `length` that all rules accept.

        Calls `note` with each rule that does not accept a length, before it is lowered.
        """
        length = self._align(length)
        before = -1
        while before != length > self._bounds.local_tokens:
            before = length
            for rule in rules:
                lowered = rule.longest_valid(length)
                if lowered < length:
                    note(rule, length)
                    length = self._align(lowered)
        return length

    def loads(self, length: int) -> tuple[GroupLoad, ...]:
        """What each group has to load for `length`."""
        if length <= self._bounds.local_tokens:
            return ()
        return tuple(
            GroupLoad(rule.chunks.group_id, needed_chunks(rule, length), tokens)
            for rule in self.rules
            if (tokens := rule.needed(length))
        )

    def _rules(self, lookups: GroupLookups) -> tuple[GroupRule, ...]:
        local = self._bounds.local_tokens
        pairs = zip(self._geometry.groups, lookups, strict=True)
        return tuple(rule_for(chunks, codes, local) for chunks, codes in pairs)

    def _align(self, length: int) -> int:
        """Lengths between strides can never be hits; skipping them keeps the reasons true."""
        return max(self._bounds.local_tokens, floor_to(length, self._stride))


def _obstacle(rule: GroupRule, lookups: GroupLookups, length: int) -> Obstacle | None:
    chunk = rule.blocking_chunk(length)
    if chunk is None:
        return None
    chunks = rule.chunks
    return Obstacle(
        group_id=chunks.group_id,
        kind=chunks.group.kind,
        chunk=chunk,
        tokens=chunks.tokens(chunk),
        lookup=_LOOKUPS[lookups[chunks.group_id][chunk]],
        wanted_tokens=length,
    )
