"""What is known about a lower tier's content, without asking it.

A key is present, absent, bad, being asked about, or unknown. Absence is believed for a while only,
because others may write to a shared tier; badness for good, because a key that lied once is not
worth a second look.

Ownership: the scheduler thread owns every field.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata.core.ids import ChunkKey

MOST_ABSENT: Final = 1_000_000
"""Absences remembered at most; the oldest are forgotten."""


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
        absent_s: how long an absence is believed.
    """

    def __init__(self, clock: Callable[[], float], absent_s: float = 5.0) -> None:
        self._clock = clock
        self._absent_s = absent_s
        self._present: set[ChunkKey] = set()
        self._asked: set[ChunkKey] = set()
        self._bad: set[ChunkKey] = set()
        self._absent_until: OrderedDict[ChunkKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._present)

    def presence(self, key: ChunkKey) -> Presence:
        """What is known about a key. Changes nothing."""
        if key in self._present:
            return Presence.PRESENT
        if key in self._bad:
            return Presence.BAD
        if key in self._asked:
            return Presence.ASKED
        until = self._absent_until.get(key)
        return Presence.ABSENT if until is not None and self._clock() < until else Presence.UNKNOWN

    def asked(self, keys: Iterable[ChunkKey]) -> None:
        """A question about these is under way."""
        self._asked.update(keys)

    def found(self, keys: Iterable[ChunkKey]) -> None:
        """These are there; a good copy clears a bad name."""
        for key in keys:
            self._forget(key)
            self._present.add(key)

    def missed(self, keys: Iterable[ChunkKey]) -> None:
        """These are not there."""
        until = self._clock() + self._absent_s
        for key in keys:
            self._forget(key)
            self._absent_until[key] = until
        while len(self._absent_until) > MOST_ABSENT:
            self._absent_until.popitem(last=False)

    def spoiled(self, keys: Iterable[ChunkKey]) -> None:
        """These were there and wrong."""
        for key in keys:
            self._forget(key)
            self._bad.add(key)

    def unanswered(self, keys: Iterable[ChunkKey]) -> None:
        """A question about these failed: nothing is known."""
        self._asked.difference_update(keys)

    def _forget(self, key: ChunkKey) -> None:
        self._present.discard(key)
        self._bad.discard(key)
        self._asked.discard(key)
        self._absent_until.pop(key, None)
