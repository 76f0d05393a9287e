"""What is known about a lower tier's content, without asking it.

A key is present, absent, bad, being asked about, or unknown. Presence and absence are believed for
a while only: others write to a shared tier, and its own eviction or expiry is not told to anybody.
Everything is bounded; what is forgotten is unknown, and asked about again.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata.core.ids import ChunkKey

MOST_KNOWN: Final = 4_000_000
"""Facts remembered at most; the oldest are forgotten."""


class Presence(IntEnum):
    """What is known about one key."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2
    ASKED = 3
    BAD = 4


class KnownChunks:
    """One tier's content as far as it is known.

    Args:
        clock: monotonic seconds.
        present_s: how long a presence is believed.
        absent_s: how long an absence is believed.
    """

    def __init__(
        self, clock: Callable[[], float], *, present_s: float = 600.0, absent_s: float = 5.0
    ) -> None:
        self._clock = clock
        self._lives = {
            Presence.PRESENT: present_s,
            Presence.ABSENT: absent_s,
            Presence.BAD: float("inf"),
        }
        self._facts: OrderedDict[ChunkKey, tuple[Presence, float]] = OrderedDict()
        self._asked: set[ChunkKey] = set()

    def __len__(self) -> int:
        return len(self._facts)

    def presence(self, key: ChunkKey) -> Presence:
        """What is known about a key. Changes nothing."""
        fact = self._facts.get(key)
        if fact is not None and self._clock() < fact[1]:
            return fact[0]
        return Presence.ASKED if key in self._asked else Presence.UNKNOWN

    def asked(self, keys: Iterable[ChunkKey]) -> None:
        """A question about these is under way; what was known before does not count any more."""
        for key in keys:
            self._asked.add(key)
            self._facts.pop(key, None)

    def unanswered(self, keys: Iterable[ChunkKey]) -> None:
        """A question about these failed: nothing is known."""
        self._asked.difference_update(keys)

    def found(self, keys: Iterable[ChunkKey]) -> None:
        """These are there; a good copy clears a bad name."""
        self._note(keys, Presence.PRESENT)

    def missed(self, keys: Iterable[ChunkKey]) -> None:
        """These are not there."""
        self._note(keys, Presence.ABSENT)

    def spoiled(self, keys: Iterable[ChunkKey]) -> None:
        """These were there and wrong: not worth a second look."""
        self._note(keys, Presence.BAD)

    def _note(self, keys: Iterable[ChunkKey], presence: Presence) -> None:
        until = self._clock() + self._lives[presence]
        for key in keys:
            self._asked.discard(key)
            self._facts[key] = (presence, until)
            self._facts.move_to_end(key)
        while len(self._facts) > MOST_KNOWN:
            self._facts.popitem(last=False)
