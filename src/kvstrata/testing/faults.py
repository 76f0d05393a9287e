"""Damage to stored bytes, and the figures that a run of injected faults ends with.

A damage is a pure function of a chunk's raw bytes and a source of randomness, so it does the same
to a file, a value and an object. `Tally` counts what was injected and keeps the worst of what came
of it.

Ownership: a tally may be used from several threads; `_mutex` guards all of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from kvstrata.testing.chunks import content, filled
from kvstrata.tiers.chunk_format import HEADER_BYTES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.outcomes import TierOutcome

    Damage: TypeAlias = Callable[[bytes, random.Random], bytes]

_SECTOR_BYTES: Final = 512
_HEADER_USED_BYTES: Final = 250
"""About as many bytes of a header page are not padding."""


def flip_header_bit(raw: bytes, rng: random.Random) -> bytes:
    """One wrong bit in the part of the header that says something."""
    return _with_flipped_bit(raw, rng.randrange(_HEADER_USED_BYTES), rng)


def flip_padding_bit(raw: bytes, rng: random.Random) -> bytes:
    """One wrong bit anywhere in the header page."""
    return _with_flipped_bit(raw, rng.randrange(HEADER_BYTES), rng)


def flip_payload_bit(raw: bytes, rng: random.Random) -> bytes:
    """One wrong bit in the payload."""
    return _with_flipped_bit(raw, rng.randrange(HEADER_BYTES, len(raw)), rng)


def truncate(raw: bytes, rng: random.Random) -> bytes:
    """The start, of any length that is too short."""
    return raw[: rng.randrange(len(raw))]


def grow(raw: bytes, rng: random.Random) -> bytes:
    """All of it, and more behind it."""
    return raw + rng.randbytes(rng.randint(1, 5000))


def zero_sector(raw: bytes, rng: random.Random) -> bytes:
    """A sector that was never written; one that says something."""
    sectors = [s for s in range(0, len(raw), _SECTOR_BYTES) if any(raw[s : s + _SECTOR_BYTES])]
    start = rng.choice(sectors)
    size = len(raw[start : start + _SECTOR_BYTES])
    return raw[:start] + bytes(size) + raw[start + size :]


def tear(raw: bytes, rng: random.Random) -> bytes:
    """The right size, and zeros from some point on: a crash before the data was synced."""
    kept = rng.randrange(len(raw.rstrip(b"\0")))
    return raw[:kept] + bytes(len(raw) - kept)


def scramble(raw: bytes, rng: random.Random) -> bytes:
    """A run of wrong bytes somewhere."""
    start = rng.randrange(len(raw))
    stop = min(len(raw), start + rng.randint(1, _SECTOR_BYTES))
    wrong = bytes(byte ^ rng.randint(1, 255) for byte in raw[start:stop])
    return raw[:start] + wrong + raw[stop:]


DAMAGES: Final[Mapping[str, Damage]] = {
    "header bit flipped": flip_header_bit,
    "header page bit flipped": flip_padding_bit,
    "payload bit flipped": flip_payload_bit,
    "truncated": truncate,
    "grown": grow,
    "sector zeroed": zero_sector,
    "torn": tear,
    "scrambled": scramble,
}


class Tally:
    """What was injected, and the worst that came of it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.faults: Counter[str] = Counter()
        self.num_verified = 0
        """Chunks that were returned and compared with what was written."""
        self.num_wrong = 0
        """Chunks that were returned with other bytes."""
        self.num_timed = 0
        """Calls on a medium that did not answer."""
        self.worst_overrun = 0.0
        """The largest overrun of a deadline, as a share of the time given."""
        self.num_durable = 0
        """Chunks acknowledged as durable before a kill, and looked for afterwards."""
        self.num_lost = 0
        """Of those, not readable."""
        self.worst_excess = 0.0
        """The largest excess over a quota, in chunks for each writer."""

    @property
    def num_faults(self) -> int:
        """Of all kinds."""
        return self.faults.total()

    def inject(self, kind: str, count: int = 1) -> None:
        """Count faults."""
        with self._mutex:
            self.faults[kind] += count

    def verify(self, buffers: Iterable[ChunkBuffer], outcome: TierOutcome) -> None:
        """Compare what a read returned with the bytes that belong to the labels."""
        done = [buffer for buffer in buffers if buffer.label.key in outcome.done]
        wrong = [b for b in done if content(b) != content(filled(b.label))]
        self.count_verified(len(done), num_wrong=len(wrong))

    def count_verified(self, num_chunks: int, *, num_wrong: int) -> None:
        """Count chunks that were compared elsewhere."""
        with self._mutex:
            self.num_verified += num_chunks
            self.num_wrong += num_wrong

    def time(self, taken_s: float, given_s: float) -> None:
        """Count a call that had a deadline to keep."""
        with self._mutex:
            self.num_timed += 1
            self.worst_overrun = max(self.worst_overrun, taken_s / given_s - 1)

    def count_durable(self, num_chunks: int, *, num_lost: int) -> None:
        """Count chunks that had to survive a kill."""
        with self._mutex:
            self.num_durable += num_chunks
            self.num_lost += num_lost

    def weigh(self, chunks_per_writer: float) -> None:
        """Note an excess over a quota."""
        with self._mutex:
            self.worst_excess = max(self.worst_excess, chunks_per_writer)

    def add(self, other: Tally) -> None:
        """Take in what another tally counted."""
        with self._mutex:
            self.faults += other.faults
            self.num_verified += other.num_verified
            self.num_wrong += other.num_wrong
            self.num_timed += other.num_timed
            self.num_durable += other.num_durable
            self.num_lost += other.num_lost
            self.worst_overrun = max(self.worst_overrun, other.worst_overrun)
            self.worst_excess = max(self.worst_excess, other.worst_excess)

    def summary(self) -> str:
        """The figures in one line; those that nothing was counted for are left out."""
        facts = [f"{self.num_faults} faults"]
        if self.num_verified:
            facts.append(f"{self.num_wrong} of {self.num_verified} chunks wrong")
        if self.num_timed:
            facts.append(f"worst overrun {self.worst_overrun:.1%} in {self.num_timed} calls")
        if self.num_durable:
            facts.append(f"{self.num_lost} of {self.num_durable} durable chunks lost")
        if self.worst_excess:
            facts.append(f"quota exceeded by {self.worst_excess:.2f} chunks per writer")
        return ", ".join(facts)

    def check(self) -> None:
        """State what no fault may bring about."""
        assert self.num_wrong == 0, self.summary()
        assert self.num_lost == 0, self.summary()
        assert self.worst_overrun <= 0.10, self.summary()
        assert self.worst_excess <= 1, self.summary()


def _with_flipped_bit(raw: bytes, offset: int, rng: random.Random) -> bytes:
    return raw[:offset] + bytes([raw[offset] ^ (1 << rng.randrange(8))]) + raw[offset + 1 :]
