"""What one request has computed, and what of it has been stored.

The ledger holds facts; `choose_stores` reads them and decides. Facts about stored chunks outlive a
preemption (the bytes are below already), facts about the device do not.

Ownership: belongs to one request on the scheduler thread; dropped when the request has ended and
its last store has settled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, floor_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata.core.chunk_grid import ChunkGrid
    from kvstrata.core.ids import GroupId
    from kvstrata.planning.load_plan import LoadPlan

MAX_ATTEMPTS: Final = 2
"""How often a chunk is tried when its store fails."""


class ChunkProgress(IntEnum):
    """How far one chunk of one request has come."""

    OPEN = 0
    """Not stored, and nothing under way."""
    IN_FLIGHT = 1
    STORED = 2
    GIVEN_UP = 3
    """Its store failed as often as it may."""


_TAKEN: Final = (ChunkProgress.IN_FLIGHT, ChunkProgress.STORED)


class ChunkRef(NamedTuple):
    """One chunk of one request."""

    group_id: GroupId
    chunk: int


class StateOffer(NamedTuple):
    """A recurrent state that exists on the device now, taken after `boundary_tokens` tokens."""

    group_id: GroupId
    boundary_tokens: int


@dataclass(slots=True)
class _OnDevice:
    """What a preemption takes away."""

    news_tokens: int
    """Storable tokens that complete an attention chunk more than when stores were last begun."""
    computed_tokens: int = 0
    step_start: int = 0
    """Tokens computed before the last step."""
    has_retry: bool = False
    """Whether a store failed since then."""
    offers: list[StateOffer] = field(default_factory=list)


class RequestLedger:
    """One request's progress: computed, in flight, stored.

    Args:
        grid: the request's chunks; grows with its hashes.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self.grid = grid
        self._progress = [bytearray() for _ in grid.geometry.groups]
        self._failures: dict[ChunkRef, int] = {}
        self._has_ended = False
        self._device = _OnDevice(self._next_end(0))

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is final on the device."""
        return self._device.computed_tokens

    @property
    def storable_tokens(self) -> int:
        """Tokens that are computed and hashed."""
        return min(self._device.computed_tokens, self.grid.hashed_tokens)

    @property
    def offers(self) -> tuple[StateOffer, ...]:
        """The recurrent states that exist on the device until the next step."""
        return tuple(self._device.offers)

    @property
    def has_ended(self) -> bool:
        """Whether the request was finished or aborted."""
        return self._has_ended

    @property
    def has_news(self) -> bool:
        """Whether a chunk was completed or a state offered since stores were last begun.

        While it is false there is nothing to choose; most decode steps end here.
        """
        device = self._device
        if device.offers or device.has_retry:
            return True
        news = device.news_tokens
        return device.computed_tokens >= news and self.grid.hashed_tokens >= news

    @property
    def num_in_flight(self) -> int:
        """Stores begun and not settled."""
        return sum(row.count(ChunkProgress.IN_FLIGHT) for row in self._progress)

    def progress(self, ref: ChunkRef) -> ChunkProgress:
        """How far one chunk has come."""
        return ChunkProgress(self._code(ref))

    def is_taken(self, ref: ChunkRef) -> bool:
        """Whether a chunk is stored or on its way."""
        return self._code(ref) in _TAKEN

    def open_chunks(self, group_id: GroupId, stop: int) -> list[int]:
        """The chunks before `stop` that are still on the device and not stored."""
        row = self._progress[group_id]
        first_open = row.find(ChunkProgress.OPEN)
        start = max(self._first_kept(group_id), len(row) if first_open < 0 else first_open)
        known = min(stop, len(row))
        still_open = [i for i in range(start, known) if row[i] == ChunkProgress.OPEN]
        return still_open + list(range(max(start, known), stop))

    def taken_chunks(self, group_id: GroupId, start: int, stop: int) -> list[int]:
        """The chunks in [start, stop) that are stored or on their way."""
        row = self._progress[group_id][start:stop]
        if not any(row):  # most of the time, and without a loop in Python
            return []
        return [start + i for i, progress in enumerate(row) if progress in _TAKEN]

    def advance(self, computed_tokens: int) -> None:
        """A step has computed the tokens up to here; offers of earlier steps are void.

        Raises:
            ValueError: fewer tokens than before, which only `preempt` may cause, or the request
                has ended.
        """
        self._check_running()
        device = self._device
        if computed_tokens < device.computed_tokens:
            raise ValueError(
                f"computed_tokens went from {device.computed_tokens} to {computed_tokens} "
                f"without a preemption"
            )
        device.step_start, device.computed_tokens = device.computed_tokens, computed_tokens
        if device.offers:
            device.offers.clear()

    def offer_state(self, offer: StateOffer) -> None:
        """A recurrent state exists until the next step.

        Raises:
            ValueError: the group has no states, or the request has ended.
        """
        self._check_running()
        kind = self.grid.geometry.groups[offer.group_id].group.kind
        if kind is not GroupKind.RECURRENT:
            raise ValueError(f"{kind} group {offer.group_id} has no states to offer")
        self._device.offers.append(offer)

    def resume(self, plan: LoadPlan) -> None:
        """Go on from a hit: its tokens are on the device, the chunks it loaded are stored.

        Raises:
            ValueError: the request has computed tokens already.
        """
        if self._device.computed_tokens:
            raise ValueError(
                f"cannot resume: {self._device.computed_tokens} tokens are computed already"
            )
        self.advance(plan.num_tokens)
        self._device.step_start = plan.num_tokens
        for load in plan.loads:
            for index in load.chunks:
                ref = ChunkRef(load.group_id, index)
                if self._code(ref) != ChunkProgress.IN_FLIGHT:
                    self._mark(ref, ChunkProgress.STORED)

    def preempt(self) -> None:
        """The engine took the request's blocks; what is stored or in flight stays so."""
        self._device = _OnDevice(self._next_end(0))

    def end(self) -> None:
        """The request was finished or aborted: nothing new is stored, stores in flight settle."""
        self._has_ended = True
        self._device = _OnDevice(sys.maxsize)

    def begin(self, refs: Iterable[ChunkRef]) -> None:
        """Stores of these chunks start now; what was not taken waits for the next news.

        Call it after each choice, also when nothing is taken. Atomic: on an error nothing changes.

        Raises:
            ValueError: a chunk is in flight or stored already, or named twice.
        """
        refs = list(refs)
        for ref in refs:
            if self._code(ref) != ChunkProgress.OPEN:
                raise ValueError(f"{ref} cannot be stored: it is {self.progress(ref).name}")
        if len(set(refs)) < len(refs):
            raise ValueError("a chunk is named twice")
        for ref in refs:
            self._mark(ref, ChunkProgress.IN_FLIGHT)
        self._device.news_tokens = self._next_end(self.storable_tokens)
        self._device.has_retry = False
        self._device.offers.clear()

    def settle(self, stored: Iterable[ChunkRef], failed: Iterable[ChunkRef] = ()) -> None:
        """Stores have ended; a failed chunk may be tried again while it is on the device.

        Atomic: on an error nothing changes.

        Raises:
            ValueError: a chunk was not in flight.
        """
        stored, failed = list(stored), list(failed)
        for ref in (*stored, *failed):
            if self._code(ref) != ChunkProgress.IN_FLIGHT:
                raise ValueError(f"{ref} is {self.progress(ref).name}, not in flight")
        for ref in stored:
            self._mark(ref, ChunkProgress.STORED)
        for ref in failed:
            self._retry_or_give_up(ref)

    def _retry_or_give_up(self, ref: ChunkRef) -> None:
        failures = self._failures.pop(ref, 0) + 1
        if failures >= MAX_ATTEMPTS:
            self._mark(ref, ChunkProgress.GIVEN_UP)
            return
        self._mark(ref, ChunkProgress.OPEN)
        self._failures[ref] = failures
        self._device.has_retry = True

    def _check_running(self) -> None:
        if self._has_ended:
            raise ValueError("the request has ended")

    def _next_end(self, num_tokens: int) -> int:
        """Where the first attention chunk ends that so many tokens do not complete."""
        sizes = self.grid.geometry.attention_sizes
        return min([floor_to(num_tokens, size) + size for size in sizes], default=sys.maxsize)

    def _first_kept(self, group_id: GroupId) -> int:
        """The first chunk whose blocks the engine has not taken back.

        Window groups alone give blocks back: after a step they keep what its first token saw.
        """
        chunks = self.grid.geometry.groups[group_id]
        window = chunks.group.window_tokens
        if window is None:
            return 0
        seen = max(0, self._device.step_start - window + 1)
        return ceil_div(floor_to(seen, chunks.group.block_tokens), chunks.chunk_tokens)

    def _code(self, ref: ChunkRef) -> int:
        """A `ChunkProgress`, without making one."""
        row = self._progress[ref.group_id]
        return row[ref.chunk] if ref.chunk < len(row) else ChunkProgress.OPEN

    def _mark(self, ref: ChunkRef, progress: ChunkProgress) -> None:
        row = self._progress[ref.group_id]
        if ref.chunk >= len(row):
            row.extend(bytes(ref.chunk + 1 - len(row)))
        row[ref.chunk] = progress
