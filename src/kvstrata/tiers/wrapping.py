"""Stores around stores: slower, broken on purpose, or counted; for tests and measurements."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierError, TierUnavailable
from kvstrata.interfaces import TellsEvictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.interfaces import ChunkStore


class WrappedStore:
    """Passes everything on. Subclasses change what they are about.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: ChunkStore) -> None:
        self.inner = inner

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """As the inner store does."""
        return self.inner.read(chunks, deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """As the inner store does."""
        return self.inner.write(chunks, deadline)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """As the inner store does."""
        return self.inner.find(keys, deadline)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """As the inner store does."""
        return self.inner.remove(keys, deadline)

    def take_evicted(self) -> list[ChunkKey]:
        """As the inner store does, if it can tell."""
        return self.inner.take_evicted() if isinstance(self.inner, TellsEvictions) else []

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()


class DelayedStore(WrappedStore):
    """Waits before each read and write, deadline or not: as a hung file system does.

    Args:
        inner: the store that does the work.
        delay_s: seconds before each call; may be changed at any time.
    """

    def __init__(self, inner: ChunkStore, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Wait, then read."""
        time.sleep(self.delay_s)
        return self.inner.read(chunks, deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Wait, then write."""
        time.sleep(self.delay_s)
        return self.inner.write(chunks, deadline)


class FailingStore(WrappedStore):
    """Fails for the keys that `fails` picks, before the inner store sees them.

    Args:
        inner: the store that does the rest.
        fails: whether a call for this key fails; may be replaced at any time.
        error: what the failure is.
    """

    def __init__(
        self,
        inner: ChunkStore,
        fails: Callable[[ChunkKey], bool],
        error: TierError | None = None,
    ) -> None:
        super().__init__(inner)
        self.fails = fails
        self._error = error or TierUnavailable("failing", "made to fail")

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Read what does not fail."""
        good = [chunk for chunk in chunks if not self.fails(chunk.label.key)]
        return self._with_failures(chunks, self.inner.read(good, deadline))

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Write what does not fail."""
        good = [chunk for chunk in chunks if not self.fails(chunk.label.key)]
        return self._with_failures(chunks, self.inner.write(good, deadline))

    def _with_failures(self, chunks: Sequence[ChunkBuffer], rest: TierOutcome) -> TierOutcome:
        settled = rest.done | rest.absent | rest.failed.keys()
        failed = [c.label.key for c in chunks if c.label.key not in settled]
        return rest.merged(TierOutcome.all_failed(failed, self._error))


class CountingStore(WrappedStore):
    """Counts calls, chunks and bytes by what was asked for.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Read and count."""
        self._count("read", chunks)
        return self.inner.read(chunks, deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Write and count."""
        self._count("write", chunks)
        return self.inner.write(chunks, deadline)

    def _count(self, verb: str, chunks: Sequence[ChunkBuffer]) -> None:
        with self._mutex:
            self.counts[f"{verb} calls"] += 1
            self.counts[f"{verb} chunks"] += len(chunks)
            self.counts[f"{verb} bytes"] += sum(chunk.label.payload_bytes for chunk in chunks)
