"""The seams of kvstrata, on one page: what others may implement.

Each has a contract suite in `kvstrata.testing`; an implementation is done when it passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.lookups import LookupCodes
    from kvstrata.core.outcomes import Deadline, TierOutcome


class ChunkIndex(Protocol):
    """Knows which chunks exist, without their bytes. Scheduler thread only."""

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """What is known about each key, in the order asked. Never blocks. Changes nothing."""
        ...


class ChunkStore(Protocol):
    """One rank's bytes in a lower tier, within one namespace.

    Called from several threads at once. A call may block, but not past its deadline where the
    medium allows it. Never raises for a fault of the medium: the outcome says what happened to
    each key. Raises `ClosedError` after `close`.
    """

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Fill the buffers; a chunk is done only if size, checksum and header are right."""
        ...

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Keep the buffers' payloads; a done chunk is readable as a whole, now and later.

        Writing a key again is allowed and leaves one good chunk.
        """
        ...

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Which keys every rank has; verifies nothing and reads no payload."""
        ...

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Drop this rank's part of the keys."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Does nothing on successive calls."""
        ...


@runtime_checkable
class TellsEvictions(Protocol):
    """A store that knows which chunks its medium let go of by itself."""

    def take_evicted(self) -> list[ChunkKey]:
        """Hand over the chunks that left since the last call. Never blocks."""
        ...


class EvictionPolicy(Protocol):
    """The order in which chunks leave a full tier. Scheduler thread only, never blocks.

    Keys come in the order of their tokens; a policy lets a suffix go before its prefix.
    """

    def insert(self, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> None:
        """Start to follow these chunks, with their sizes in bytes."""
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks were used together; unknown keys are ignored."""
        ...

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Stop following these chunks: they left for another reason than `evict`."""
        ...

    def evict(self, may_leave: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """Stop following the next chunk to leave, among those that may; None: none may."""
        ...
