"""An index of what a publisher holds, rebuilt from its events.

Hashes are counted: two chunks that share one announce it twice and take it back twice. The index is
exact, as of the last batch read, if none is missing since the stream began or since everything was
last cleared, and the stream is still the same one. When that is not certain, `is_exact` is False:

- before the first batch, until number 0 arrives or a replay starts with it;
- behind a gap that the replay could not fill, and behind a batch that cannot be read;
- after the connection was lost, until a replay shows our last batch under its number: a publisher
  that was started again counts from 0, and may have passed our number before we heard of it.

Then the index goes on as a best guess. It becomes exact again by an AllBlocksCleared, by a new
stream that is read from its number 0, or by `catch_up` if the replay holds one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvstrata.telemetry.kv_events import BlockRemoved, BlockStored, decode_batch

if TYPE_CHECKING:
    from kvstrata.telemetry.kv_events import ExternalHash, KVEvent


class BlockAddress(NamedTuple):
    """A block of one group in one tier."""

    medium: str | None
    ownership: str | None
    """The tier's name, where the publisher says it."""
    group_idx: int | None
    block_hash: ExternalHash


class NumberedBatch(NamedTuple):
    """A batch as it came, with its number in the stream."""

    number: int
    payload: bytes


Replay = Callable[[int], Sequence[NumberedBatch] | None]
"""Fetches the batches from a number on that the publisher still has; None: no answer."""


class EventConsumer:
    """Follows the events of one publisher. Belongs to one thread.

    Args:
        replay: asks the publisher for past batches; None: it keeps none.
    """

    def __init__(self, replay: Replay | None = None) -> None:
        self._replay = replay
        self._reading = _Reading()
        self._replayed: dict[int, bytes] = {}

    @property
    def index(self) -> Mapping[BlockAddress, int]:
        """How many chunks announce each block, as of now. To look at, not to keep."""
        return MappingProxyType(self._reading.counts)

    @property
    def is_exact(self) -> bool:
        """Whether the index is all that was announced up to `next_number`, no more and no less."""
        return self._reading.is_exact

    @property
    def next_number(self) -> int:
        """The number that the next batch should have."""
        return self._reading.next_number

    @property
    def num_unknown_removals(self) -> int:
        """Removals of hashes that nobody had announced; they were ignored."""
        return self._reading.num_unknown_removals

    def receive(self, batch: NumberedBatch) -> None:
        """Apply a batch from the live stream; asks for a replay if batches before it are missing.

        Never raises for what a batch contains.
        """
        if batch.number < self.next_number:
            if self._replayed.pop(batch.number, None) == batch.payload:
                return
            self._reading, self._replayed = _Reading(), {}  # the publisher was started again
        if batch.number > self.next_number:
            self.catch_up()
        if batch.number >= self.next_number:
            self._replayed.clear()
            self._reading.apply(batch)
        elif self._replayed.pop(batch.number, None) != batch.payload:
            self.suspect()  # live stream and replay are not of the same publisher

    def suspect(self) -> None:
        """The connection was lost: what comes next may be from another stream."""
        self._reading.is_suspect = True

    def catch_up(self) -> None:
        """Ask for what the live stream did not bring, and check that it is still the same one."""
        reading = self._reading
        batches = self._ask(max(reading.next_number - 1, 0))
        if batches is None:
            return
        if reading.is_continued_by(batches):
            self._follow(batches)
        else:
            reading.is_suspect = True
        if not reading.is_exact:
            self._rebuild()

    def _ask(self, number: int) -> Sequence[NumberedBatch] | None:
        return None if self._replay is None else self._replay(number)

    def _follow(self, batches: Sequence[NumberedBatch]) -> None:
        reading = self._reading
        reading.is_suspect = False
        if not batches:  # asked from 0: nothing was ever published
            reading.is_whole = True
        for batch in batches:
            if batch.number >= reading.next_number:
                reading.apply(batch)
                self._replayed[batch.number] = batch.payload

    def _rebuild(self) -> None:
        """Read all that the replay holds from scratch; keep it only if that makes it exact."""
        batches = self._ask(0) or ()
        reading = _Reading()
        for batch in batches:
            reading.apply(batch)
        if reading.is_exact:
            self._reading = reading
            self._replayed = {batch.number: batch.payload for batch in batches}


class _Reading:
    """How far a stream was read, and what it said."""

    def __init__(self) -> None:
        self.counts: dict[BlockAddress, int] = {}
        self.next_number = 0
        self.is_whole = False
        self.is_suspect = False
        self.num_unknown_removals = 0
        self._last_payload = b""

    @property
    def is_exact(self) -> bool:
        return self.is_whole and not self.is_suspect

    def is_continued_by(self, batches: Sequence[NumberedBatch]) -> bool:
        """Whether batches begin with the last one that was read."""
        if self.next_number == 0:
            return True
        last = NumberedBatch(self.next_number - 1, self._last_payload)
        return bool(batches) and batches[0] == last

    def apply(self, batch: NumberedBatch) -> None:
        """Read the next batch, or one behind a gap."""
        if batch.number == self.next_number == 0:
            self.is_whole, self.is_suspect = True, False
        elif batch.number != self.next_number:
            self.is_whole = False
        self.next_number = batch.number + 1
        self._last_payload = batch.payload
        try:
            events = decode_batch(batch.payload).events
        except msgspec.DecodeError:
            self.is_whole = False
            return
        for event in events:
            self._apply_event(event)

    def _apply_event(self, event: KVEvent) -> None:
        if isinstance(event, BlockStored):
            for address in _addresses(event):
                self.counts[address] = self.counts.get(address, 0) + 1
        elif isinstance(event, BlockRemoved):
            for address in _addresses(event):
                self._take_back(address)
        else:
            self.counts.clear()
            self.is_whole, self.is_suspect = True, False

    def _take_back(self, address: BlockAddress) -> None:
        count = self.counts.pop(address, 0)
        if count > 1:
            self.counts[address] = count - 1
        elif count == 0:
            self.num_unknown_removals += 1


def _addresses(event: BlockStored | BlockRemoved) -> list[BlockAddress]:
    return [
        BlockAddress(event.medium, event.ownership, event.group_idx, block_hash)
        for block_hash in event.block_hashes
    ]
