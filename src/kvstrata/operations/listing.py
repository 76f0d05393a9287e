"""What operators need from a medium: what lies where, its bytes, and a way to set it aside.

Nothing here goes through a `ChunkStore`, which knows one namespace and one rank and notes every
use. Looking at a store is no use: recency survives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvstrata.tiers.file_layout import file_name, parse_file_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from kvstrata.core.chunk_label import Rank
    from kvstrata.core.ids import ChunkKey

OnProgress: TypeAlias = Callable[[int, int | None], None]
"""Called with how much is done and, where known, of how much. From several threads, in turns."""


def no_progress(done: int, total: int | None) -> None:
    """Nobody is watching."""


@dataclass(frozen=True, slots=True)
class ChunkName:
    """What a name says about the chunk behind it."""

    key: ChunkKey
    rank: Rank


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's part of a chunk lies."""

    name: str
    """Within the store."""
    namespace: str
    """The fingerprint in the name."""
    chunk: ChunkName | None
    """None: something lies where a chunk should, under a name that no reader looks for."""
    num_bytes: int
    used_ns: int | None = None
    """Last use, in nanoseconds since 1970; None: the medium does not know."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Some files together."""

    num_files: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Totals:
        """Add sizes up."""
        counted = list(sizes)
        return cls(len(counted), sum(counted))


@dataclass(frozen=True, slots=True)
class UsageCount:
    """The counter that all users of a store share, against what is there."""

    counted_bytes: int
    found_bytes: int

    @property
    def drift_bytes(self) -> int:
        """What the counter says too much; negative: too little."""
        return self.counted_bytes - self.found_bytes


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """What lies in a store besides its chunks."""

    temporary: Totals = Totals()
    """Files being written, and what crashed writers left."""
    leftovers: Totals = Totals()
    """Those among them whose writer is surely gone."""
    quarantined: Totals = Totals()
    usage: UsageCount | None = None
    """None: the medium has no counter, or it cannot be read."""


class StoreListing(Protocol):
    """One store, as operators see it. `read` and `quarantine` are called from several threads."""

    @property
    def address(self) -> str:
        """Where the store is, without credentials."""
        ...

    @property
    def medium(self) -> str:
        """What it lies on, with the version of its format."""
        ...

    def places(self) -> Iterator[Place]:
        """Everything that lies where chunks should. Changes nothing.

        Raises:
            TierUnavailable: the store cannot be listed.
        """
        ...

    def read(self, place: Place, most_bytes: int | None = None) -> Generator[memoryview]:
        """The raw bytes: the header page first, then the rest. Each piece is good until the next.

        Whoever stops before the end closes it.

        Changes nothing, the last use included.

        Raises:
            FileNotFoundError: it went away meanwhile.
            BadChunk: it is nothing that holds bytes.
            OSError: it cannot be read.
        """
        ...

    def quarantine(self, place: Place) -> str:
        """Take a bad chunk away from readers; say where it is now.

        Raises:
            FileNotFoundError: it went away meanwhile.
            OSError: it cannot be moved.
        """
        ...

    def housekeeping(self) -> Housekeeping:
        """What else is there. Changes nothing."""
        ...

    def correct_usage(self) -> bool:
        """Set the shared counter to what is there, if the medium has one; False: it refused."""
        ...

    def close(self) -> None:
        """Let go of connections. Does nothing on successive calls."""
        ...


def chunk_at(folder: str, name: str) -> ChunkName | None:
    """The chunk that readers look for under this folder and file name; None: no chunk."""
    found = parse_file_name(name)
    # Parsing is lenient about case, signs and spaces; readers only ask for the one spelling.
    if found is None or file_name(*found) != name or folder != name[: len(folder)]:
        return None
    return ChunkName(*found) if folder else None


def shown_name(name: str) -> str:
    """A name that can be printed on one line, whatever characters it has."""
    return name if name.isprintable() else ascii(name)[1:-1]
