"""What the filesystem tier reaches of what its file system gives, and how fast it finds its keys.

The measure is plain system calls: the same threads, sizes, flags and buffers, each file made aside
and renamed, but no checksum, header, limit or note of use. Both take turns, in the same folders,
and read the same files.

No file is deleted before the end. An ext4 without a journal steps around deleted inodes for a
minute or more, one by one and folder by folder; that would be measured instead. For the same reason
a run should not follow another, or many deletions, within some minutes.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.bench.report import Goal, Report, Series, fastest_s
from kvstrata.bench.vllm_files import VllmFiles, describe_vllm, vllm_file_calls
from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.core.chunk_label import ChunkBuffer, ChunkLabel, Namespace, Rank
from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.core.layout import GroupKind
from kvstrata.core.outcomes import Deadline
from kvstrata.core.spans import TokenSpan, ceil_div
from kvstrata.tiers import file_io
from kvstrata.tiers.chunk_file import takes_direct_io
from kvstrata.tiers.chunk_format import HEADER_BYTES
from kvstrata.tiers.file_index import complete_keys
from kvstrata.tiers.file_layout import StoreDirectory, file_name
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.room import PAGE_BYTES, Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstrata.config.schema import Durability

    Move = Callable[[Sequence[ChunkBuffer]], None]

KIB: Final = 2**10
MIB: Final = 2**20
_SHARE: Final = 0.9
_LIST_S: Final = 10.0
_LISTINGS: Final = 3
_DEADLINE_S: Final = 600.0
_NAMESPACE: Final = Namespace("bench", "bench", "bench", "sha256")
_DURABILITIES: Final[tuple[Durability, ...]] = ("none", "data")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved and listed."""

    chunk_sizes: tuple[int, ...] = (256 * KIB, 4 * MIB, 32 * MIB)
    total_bytes: int = 256 * MIB
    """Written and read in each round."""
    num_threads: int = 4
    num_rounds: int = 8
    """The fastest counts. An even number: both sides begin equally often."""
    num_listed: int = 1_000_000
    """Chunks of which the names are listed."""


class Seconds(NamedTuple):
    """How long a round, or the fastest of several, took."""

    plain_write: float
    tier_write: float
    plain_read: float
    tier_read: float
    vllm_write: float
    """Infinite where vLLM is not installed."""
    vllm_read: float

    @property
    def write_share(self) -> float:
        """Of what plain calls reach."""
        return self.plain_write / self.tier_write

    @property
    def read_share(self) -> float:
        """Of what plain calls reach."""
        return self.plain_read / self.tier_read


class Listing(NamedTuple):
    """What it took to make empty files named like chunks, and to list them."""

    make_s: float
    list_s: float


@dataclass(frozen=True, slots=True)
class Options:
    """How plain files are used."""

    direct: bool
    """Past the page cache."""
    sync: bool
    """Before a file gets its name."""


class PlainFiles:
    """Chunks as files through system calls alone.

    Args:
        paths: where each chunk lies; the folders exist.
        options: how files are used.
    """

    def __init__(self, paths: Mapping[ChunkKey, str], options: Options) -> None:
        self._paths = paths
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if options.direct else 0)
        self._sync = options.sync

    def write(self, chunks: Sequence[ChunkBuffer]) -> None:
        """Make each file aside, and rename it."""
        header = memoryview(mmap.mmap(-1, HEADER_BYTES))
        for chunk in chunks:
            path = self._paths[chunk.label.key]
            flags = self._flags | os.O_CREAT | os.O_EXCL | os.O_WRONLY
            fd = os.open(f"{path}.tmp", flags, 0o600)
            count = os.pwritev(fd, [header, *chunk.parts], 0)
            assert count == HEADER_BYTES + chunk.label.payload_bytes
            if self._sync:
                os.fdatasync(fd)
            os.close(fd)
            os.rename(f"{path}.tmp", path)  # noqa: PTH104 - the system call alone

    def read(self, chunks: Sequence[ChunkBuffer]) -> None:
        """Fill the buffers."""
        header = memoryview(mmap.mmap(-1, HEADER_BYTES))
        for chunk in chunks:
            fd = os.open(self._paths[chunk.label.key], self._flags | os.O_RDONLY)
            count = os.preadv(fd, [header, *chunk.parts], 0)
            assert count == HEADER_BYTES + chunk.label.payload_bytes
            os.close(fd)


class Contest:
    """The tier and plain calls, in turns.

    Args:
        folder: becomes a store, in which all sides make their files.
        buffers: the memory of one chunk each.
        durability: of the tier; the plain side syncs alike.
        num_threads: on either side.
    """

    def __init__(
        self,
        folder: Path,
        buffers: Sequence[memoryview],
        *,
        durability: Durability,
        num_threads: int,
    ) -> None:
        config = FilesystemTierConfig(path=str(folder), durability=durability)
        self._directory = StoreDirectory(folder)
        self._calls = vllm_file_calls() if durability == "none" else None
        self._buffers = buffers
        self._num_threads = num_threads
        self._options = Options(direct=takes_direct_io(str(folder)), sync=durability != "none")
        self._pool = ThreadPoolExecutor(num_threads)
        self._store = FilesystemStore(config, _NAMESPACE, Rank())

    def round(self, number: int) -> Seconds:
        """Write and read new chunks on both sides; who begins changes from round to round."""
        chunks = self._chunks(number)
        paths = {c.label.key: self._path(c.label.key) for c in chunks}
        plain = PlainFiles({key: f"{path}.plain" for key, path in paths.items()}, self._options)
        same_files = PlainFiles(paths, self._options)
        sides = (
            *self._in_turns(number, chunks, (plain.write, self._tier_write)),
            *self._in_turns(number, chunks, (same_files.read, self._tier_read)),
        )
        return Seconds(*sides, *self._peer(chunks))

    def close(self) -> None:
        """Let go of threads and files."""
        self._pool.shutdown()
        self._store.close()

    def _chunks(self, number: int) -> list[ChunkBuffer]:
        keys = _keys(len(self._buffers), seed=number)
        return [
            ChunkBuffer(_label(key, view.nbytes), (view,))
            for key, view in zip(keys, self._buffers, strict=True)
        ]

    def _path(self, key: ChunkKey) -> str:
        return str(self._directory.chunk(_NAMESPACE, key, Rank()))

    def _peer(self, chunks: Sequence[ChunkBuffer]) -> tuple[float, float]:
        """VLLM's seconds for the same work, where it is installed."""
        if self._calls is None:
            return float("inf"), float("inf")
        folder = self._directory.namespace(_NAMESPACE.fingerprint)
        files = VllmFiles(self._calls, folder, direct=self._options.direct)
        return self._timed(files.write, chunks), self._timed(files.read, chunks)

    def _in_turns(
        self, number: int, chunks: Sequence[ChunkBuffer], sides: tuple[Move, Move]
    ) -> tuple[float, float]:
        if number % 2:
            first, second = sides
            return self._timed(first, chunks), self._timed(second, chunks)
        second_s, first_s = (self._timed(side, chunks) for side in reversed(sides))
        return first_s, second_s

    def _timed(self, move: Move, chunks: Sequence[ChunkBuffer]) -> float:
        shares = [chunks[start :: self._num_threads] for start in range(self._num_threads)]
        start_s = time.perf_counter()
        for _ in self._pool.map(move, shares):
            pass
        return time.perf_counter() - start_s

    def _tier_write(self, chunks: Sequence[ChunkBuffer]) -> None:
        outcome = self._store.write(chunks, _soon())
        assert len(outcome.done) == len(chunks), outcome.failed

    def _tier_read(self, chunks: Sequence[ChunkBuffer]) -> None:
        outcome = self._store.read(chunks, _soon())
        assert len(outcome.done) == len(chunks), outcome.failed


def run(scale: Scale | None = None, folder: Path | None = None) -> Report:
    """Measure in a temporary directory inside `folder`, by default the current one."""
    scale = scale or Scale()
    with _temporary(folder or Path()) as place:
        mode = "direct" if takes_direct_io(str(place)) else "buffered"
        results = {
            durability: measure_sizes(place, scale, durability) for durability in _DURABILITIES
        }
        listing = measure_listing(place, scale.num_listed)
    return Report(
        name="filesystem",
        setting=(
            f"{scale.total_bytes // MIB} MiB in chunks of each size, {scale.num_threads} threads, "
            f"{mode} I/O, {_file_calls()}, checksums on, goals at durability none; "
            f"shares of what plain system calls reach in the same folders, fastest of "
            f"{scale.num_rounds} rounds in turns; "
            f"{scale.num_listed:,} chunks listed, one rank, made in {listing.make_s:.3g} s; "
            f"{describe_vllm(vllm_file_calls())}"
        ),
        goals=(
            *_share_goals(results["none"]),
            Goal(f"list {scale.num_listed:,} chunks", listing.list_s, _LIST_S, "s"),
        ),
        series=tuple(
            _throughput(durability, scale.total_bytes, rows) for durability, rows in results.items()
        ),
    )


def _file_calls() -> str:
    return "native file calls" if file_io.HAS_NATIVE else "file calls in Python"


def measure_sizes(folder: Path, scale: Scale, durability: Durability) -> dict[int, Seconds]:
    """The fastest of several rounds with each size of chunk."""
    return {size: measure(folder, scale, size, durability) for size in scale.chunk_sizes}


def measure(folder: Path, scale: Scale, chunk_bytes: int, durability: Durability) -> Seconds:
    """The fastest of several rounds with one size of chunk."""
    place = folder / f"{durability}-{chunk_bytes}"
    place.mkdir()
    num_chunks = max(scale.num_threads, scale.total_bytes // chunk_bytes)
    with ExitStack() as stack:
        buffers = stack.enter_context(_filled_buffers(num_chunks, chunk_bytes))
        contest = Contest(place, buffers, durability=durability, num_threads=scale.num_threads)
        stack.enter_context(closing(contest))
        rounds = [contest.round(number) for number in range(scale.num_rounds)]
    _empty_files(place)
    return Seconds(*map(min, zip(*rounds, strict=True)))


def measure_listing(folder: Path, num_chunks: int) -> Listing:
    """Make empty files named like chunks, and list which chunks are complete."""
    namespace = StoreDirectory(folder).namespace(_NAMESPACE.fingerprint)
    for number in range(256):
        (namespace / f"{number:02x}").mkdir(parents=True)
    start = time.perf_counter()
    for key in _keys(num_chunks):
        path = f"{namespace}/{key[:1].hex()}/{file_name(key, Rank())}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    make_s = time.perf_counter() - start
    assert len(complete_keys(namespace, 1)) == num_chunks
    return Listing(make_s, fastest_s(lambda: complete_keys(namespace, 1), repeats=_LISTINGS))


def _empty_files(folder: Path) -> None:
    """Free the room of all files, and keep their inodes."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix=".kvstrata-bench-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextmanager
def _filled_buffers(count: int, num_bytes: int) -> Iterator[tuple[memoryview, ...]]:
    """Memory with random bytes, from an arena as the host tier has it."""
    num_pages = ceil_div(num_bytes, PAGE_BYTES)
    with closing(HostArena(count * num_pages * PAGE_BYTES)) as arena:
        views = arena.parts(
            Extent(first, num_pages) for first in range(0, count * num_pages, num_pages)
        )
        payload = random.randbytes(num_pages * PAGE_BYTES)  # noqa: S311 - filler
        for view in views:
            view[:] = payload
        try:
            yield views
        finally:
            for view in views:
                view.release()


def _keys(count: int, *, seed: int = 0) -> Iterator[ChunkKey]:
    source = random.Random(seed)  # noqa: S311 - names, no secrets
    for _ in range(count):
        yield chunk_key(BlockHash(source.randbytes(32)), GroupId(0))


def _label(key: ChunkKey, payload_bytes: int) -> ChunkLabel:
    return ChunkLabel(key, GroupKind.FULL, 16, TokenSpan(0, 16), BlockHash(b""), payload_bytes)


def _soon() -> Deadline:
    return Deadline(time.monotonic() + _DEADLINE_S)


def _share_goals(results: dict[int, Seconds]) -> Iterator[Goal]:
    for size, took in results.items():
        for name, share in (("write", took.write_share), ("read", took.read_share)):
            title = f"{name} chunks of {size // KIB:,} KiB"
            yield Goal(title, share, _SHARE, "of plain calls", "at least")


def _throughput(durability: Durability, num_bytes: int, results: dict[int, Seconds]) -> Series:
    def row(took: Seconds) -> tuple[float, ...]:
        speeds = [num_bytes / 1e9 / seconds for seconds in took]
        return (*speeds[:4], took.write_share, took.read_share, *(s for s in speeds[4:] if s))

    columns = ["plain write", "tier write", "plain read", "tier read", "write share", "read share"]
    rows = tuple((size, row(took)) for size, took in results.items())
    if any(len(values) > len(columns) for _, values in rows):
        columns += ["vLLM write", "vLLM read"]
    return Series(f"Durability {durability}, GB/s and shares", "chunk bytes", tuple(columns), rows)
