"""A store in a dictionary: the plainest `ChunkStore` there can be, for tests of what uses one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import ClosedError, TierTimeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.core.chunk_label import ChunkBuffer, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline

Shelf = dict[tuple["ChunkKey", "Rank"], bytes]


class MemoryStore:
    """Keeps payloads without headers or checksums; several ranks share one shelf.

    Args:
        rank: whose part.
        shelf: where all ranks' bytes lie; None: a new one.
    """

    def __init__(self, rank: Rank, shelf: Shelf | None = None) -> None:
        self.rank = rank
        self.shelf: Shelf = {} if shelf is None else shelf
        self._mutex = threading.Lock()
        self._is_closed = False

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Fill the buffers."""
        by_key = {chunk.label.key: chunk for chunk in chunks}
        if late := self._late(by_key, deadline):
            return late
        with self._mutex:
            found = {key: self.shelf.get((key, self.rank)) for key in by_key}
        for key, payload in found.items():
            _fill(by_key[key], payload or b"")
        done = frozenset(key for key, payload in found.items() if payload is not None)
        return TierOutcome(done, frozenset(by_key) - done)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Keep the payloads."""
        if late := self._late([chunk.label.key for chunk in chunks], deadline):
            return late
        with self._mutex:
            for chunk in chunks:
                self.shelf[chunk.label.key, self.rank] = b"".join(chunk.payload())
        return TierOutcome(frozenset(chunk.label.key for chunk in chunks))

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Which keys every rank has."""
        if late := self._late(keys, deadline):
            return late
        ranks = [type(self.rank)(index, self.rank.count) for index in range(self.rank.count)]
        with self._mutex:
            done = frozenset(k for k in keys if all((k, rank) in self.shelf for rank in ranks))
        return TierOutcome(done, frozenset(keys) - done)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Drop this rank's part."""
        if late := self._late(keys, deadline):
            return late
        with self._mutex:
            done = frozenset(k for k in keys if self.shelf.pop((k, self.rank), None) is not None)
        return TierOutcome(done, frozenset(keys) - done)

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _late(self, keys: Iterable[ChunkKey], deadline: Deadline) -> TierOutcome | None:
        if self._is_closed:
            raise ClosedError("memory store is closed")
        if time.monotonic() <= deadline:
            return None
        keys = list(keys)
        return TierOutcome.all_failed(keys, TierTimeout("memory", "the deadline passed", keys))


def _fill(chunk: ChunkBuffer, payload: bytes) -> None:
    offset = 0
    for part in chunk.payload():
        piece = payload[offset : offset + part.nbytes]
        part[: len(piece)] = piece
        offset += part.nbytes
