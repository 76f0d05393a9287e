"""What the host tier costs: look-ups, making room, what an arena loses, and copies through it.

Room is measured in steady state: requests of chunks as hybrid models have them pass through an
index until its arena has turned over many times, some come back, some are held meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.bench.report import Goal, Report, Series
from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.core.lookups import READY_BYTE
from kvstrata.core.spans import ceil_to
from kvstrata.policies.registry import make_policy
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.tiers.room import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstrata.config.schema import EvictionName
    from kvstrata.interfaces import EvictionPolicy
    from kvstrata.tiers.room import Extent

KIB: Final = 2**10
MIB: Final = 2**20
MIXTURE: Final = {
    64 * KIB: 20,
    70_144: 20,
    256 * KIB: 20,
    2_816 * KIB: 15,
    4 * MIB: 15,
    8_704 * KIB: 8,
    60 * MIB: 2,
}
"""Chunk sizes of a hybrid model's groups, each with how often it occurs in 100 chunks."""
_BATCH: Final = 512
_BATCHES: Final = 256
_POLICIES: Final[tuple[EvictionName, ...]] = ("lru", "arc")
_CHUNKS_PER_REQUEST: Final = (4, 40)
_HELD_REQUESTS: Final = 4
_RETURN_SHARE: Final = 0.3
_RECENT_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is indexed, turned over and copied."""

    num_indexed: int = 1_000_000
    capacity_bytes: int = 4096 * MIB
    """Of the arena that turns over; no memory is taken for it."""
    num_turnovers: int = 24
    """The first four are not measured."""
    copy_sizes: tuple[int, ...] = (256 * KIB, 4 * MIB, 32 * MIB)
    arena_bytes: int = 512 * MIB
    """Of the arena that is copied through."""
    num_rounds: int = 9
    """The fastest counts."""


@dataclass(slots=True)
class Meter:
    """What was seen while an arena turned over."""

    lost_bytes: list[int] = field(default_factory=list)
    """Rounding and free room, each time that somebody had to leave."""
    seconds_per_chunk: list[float] = field(default_factory=list)
    """Of reserving, evicting and settling, for each turnover."""
    num_extents: dict[int, list[int]] = field(default_factory=dict)
    """Of each chunk that got room, by chunk size."""


class Request(NamedTuple):
    """The chunks of one request, in the order of their tokens."""

    keys: list[ChunkKey]
    sizes: list[int]


class Shares(NamedTuple):
    """Speed of copies through an arena, as shares of plain ones."""

    into: float
    out_of: float


class WatchedPolicy:
    """A policy that reports when it is asked for a victim.

    Args:
        policy: decides.
        on_evict: is called before each decision.
    """

    def __init__(self, policy: EvictionPolicy, on_evict: Callable[[], None]) -> None:
        self.insert = policy.insert
        self.touch = policy.touch
        self.remove = policy.remove
        self._evict = policy.evict
        self._on_evict = on_evict

    def evict(self, may_leave: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The policy's next victim."""
        self._on_evict()
        return self._evict(may_leave)


class Turnover:
    """An index under a mixture of requests.

    Args:
        capacity_bytes: of the arena.
        eviction: the policy's name.
    """

    def __init__(self, capacity_bytes: int, eviction: EvictionName) -> None:
        policy = WatchedPolicy(make_policy(eviction, capacity_bytes), self._note_loss)
        self.index = HostMemoryIndex(capacity_bytes, policy)
        self.meter = Meter()
        self._capacity_bytes = capacity_bytes
        self._random = random.Random(0)  # noqa: S311 - a workload, no secrets
        self._rounding: dict[ChunkKey, int] = {}
        self._rounding_bytes = 0
        self._held: deque[list[ChunkKey]] = deque()
        self._recent: deque[Request] = deque(maxlen=_RECENT_REQUESTS)

    def turn_over(self) -> None:
        """Store requests until as many bytes were granted as the arena has."""
        granted_bytes = num_granted = 0
        busy_s = 0.0
        while granted_bytes < self._capacity_bytes:
            request = self._next_request()
            self._expect(request)
            start = time.perf_counter()
            reservation = self.index.reserve(*request)
            self.index.settle(reservation.granted)
            busy_s += time.perf_counter() - start
            granted_bytes += self._note_granted(request, reservation.granted)
            num_granted += len(reservation.granted)
            self._forget((*reservation.evicted, *reservation.refused))
            self._use(request, reservation.known)
        self.meter.seconds_per_chunk.append(busy_s / num_granted)

    def release_all(self) -> None:
        """End every lease."""
        while self._held:
            self.index.release(self._held.popleft())

    def _next_request(self) -> Request:
        """One that was here lately, or a new one."""
        if self._recent and self._random.random() < _RETURN_SHARE:
            return self._random.choice(self._recent)
        count = self._random.randint(*_CHUNKS_PER_REQUEST)
        sizes = self._random.choices(list(MIXTURE), list(MIXTURE.values()), k=count)
        request = Request(list(_keys(self._random, count)), sizes)
        self._recent.append(request)
        return request

    def _use(self, request: Request, known: frozenset[ChunkKey]) -> None:
        """Hold what was there of a request until some requests later."""
        hits = [key for key in request.keys if key in known]
        self.index.lease(hits)
        self._held.append(hits)
        if len(self._held) > _HELD_REQUESTS:
            self.index.release(self._held.popleft())

    def _expect(self, request: Request) -> None:
        """Count the rounding of a whole request before it gets any room: rather too much."""
        for key, size in zip(*request, strict=True):
            if key not in self._rounding:
                self._rounding[key] = ceil_to(size, PAGE_BYTES) - size
                self._rounding_bytes += self._rounding[key]

    def _forget(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._rounding_bytes -= self._rounding.pop(key)

    def _note_loss(self) -> None:
        self.meter.lost_bytes.append(self._rounding_bytes + self.index.free_bytes)

    def _note_granted(self, request: Request, granted: dict[ChunkKey, tuple[Extent, ...]]) -> int:
        """Note the extents of new chunks; returns their bytes."""
        total = 0
        for key, size in zip(*request, strict=True):
            if key in granted:
                self.meter.num_extents.setdefault(size, []).append(len(granted[key]))
                total += size
        return total


def run(scale: Scale | None = None) -> Report:
    """Measure an index of a million chunks, arenas in steady state, and copies."""
    scale = scale or Scale()
    rate = lookup_rate(scale.num_indexed, scale.num_rounds)
    meters = {name: steady_state(scale, name) for name in _POLICIES}
    shares = {size: copy_shares(scale, size) for size in scale.copy_sizes}
    return Report(
        name="host",
        setting=(
            f"look-ups of {_BATCH} new key objects among {scale.num_indexed:,} chunks; "
            f"{scale.num_turnovers} turnovers of {scale.capacity_bytes // MIB:,} MiB by chunks of "
            f"64 KiB to 60 MiB, {_RETURN_SHARE:.0%} of requests come back, {_HELD_REQUESTS} are "
            f"held; copies by one thread through a splintered arena of "
            f"{scale.arena_bytes // MIB} MiB, as shares of copies through plain memory in turns, "
            f"fastest of {scale.num_rounds}"
        ),
        goals=(
            Goal("look-ups", rate / 1e6, 1.0, "million keys/s", "at least"),
            *(_room_goals(meters, scale.capacity_bytes)),
            *(_copy_goals(shares)),
        ),
        series=(_extents_series(meters),),
    )


def lookup_rate(num_chunks: int, num_rounds: int) -> float:
    """Keys looked up in a second, all there, each asked for with an object not seen before."""
    source = random.Random(0)  # noqa: S311 - names, no secrets
    keys = list(_keys(source, num_chunks))
    index = HostMemoryIndex(num_chunks * PAGE_BYTES, make_policy("lru", num_chunks * PAGE_BYTES))
    for start in range(0, num_chunks, _BATCH):
        batch = keys[start : start + _BATCH]
        index.settle(index.reserve(batch, [PAGE_BYTES] * len(batch)).granted)
    rates = []
    for _ in range(num_rounds):
        batches = [_fresh_batch(source, keys) for _ in range(_BATCHES)]
        start_s = time.perf_counter()
        codes = [index.lookup(batch) for batch in batches]
        rates.append(sum(map(len, codes)) / (time.perf_counter() - start_s))
        assert b"".join(codes).count(READY_BYTE) == sum(map(len, batches))
    return max(rates)


def steady_state(scale: Scale, eviction: EvictionName) -> Meter:
    """What is seen after an arena has filled and turned over a few times."""
    turnover = Turnover(scale.capacity_bytes, eviction)
    num_ignored = min(4, scale.num_turnovers - 1)
    for _ in range(num_ignored):
        turnover.turn_over()
    turnover.meter = Meter()
    for _ in range(scale.num_turnovers - num_ignored):
        turnover.turn_over()
    turnover.index.check_invariants()
    return turnover.meter


def copy_shares(scale: Scale, chunk_bytes: int) -> Shares:
    """Copy chunks into an arena and back, in turns with plain memory of the same size."""
    extents = _splintered_room(scale.arena_bytes, chunk_bytes)
    outside = memoryview(bytearray(random.randbytes(chunk_bytes)))  # noqa: S311 - filler
    plain = _plain_memory(len(extents), chunk_bytes)
    with contextlib.closing(HostArena(scale.arena_bytes)) as arena:

        def through_arena(copy: Callable[[Sequence[memoryview], memoryview], None]) -> float:
            start = time.perf_counter()
            for places in extents:
                copy(arena.parts(places), outside)
            return time.perf_counter() - start

        def through_plain(copy: Callable[[Sequence[memoryview], memoryview], None]) -> float:
            start = time.perf_counter()
            for view in plain:
                copy((view,), outside)
            return time.perf_counter() - start

        through_arena(_copy_in)  # the first touch of a page is no copy
        rounds = [
            [
                through(copy)
                for copy in (_copy_in, _copy_out)
                for through in (through_plain, through_arena)
            ]
            for _ in range(scale.num_rounds)
        ]
    plain_in, arena_in, plain_out, arena_out = map(min, zip(*rounds, strict=True))
    return Shares(plain_in / arena_in, plain_out / arena_out)


def _copy_in(parts: Sequence[memoryview], outside: memoryview) -> None:
    start = 0
    for part in parts:
        stop = min(start + part.nbytes, outside.nbytes)
        part[: stop - start] = outside[start:stop]
        start = stop


def _copy_out(parts: Sequence[memoryview], outside: memoryview) -> None:
    start = 0
    for part in parts:
        stop = min(start + part.nbytes, outside.nbytes)
        outside[start:stop] = part[: stop - start]
        start = stop


def _splintered_room(capacity_bytes: int, chunk_bytes: int) -> list[tuple[Extent, ...]]:
    """Room for chunks that fill half of an arena, as they find it in steady state."""
    turnover = Turnover(capacity_bytes, "lru")
    for _ in range(4):
        turnover.turn_over()
    keys = list(_keys(random.Random(1), max(1, capacity_bytes // 2 // chunk_bytes)))  # noqa: S311
    turnover.release_all()
    granted = turnover.index.reserve(keys, [chunk_bytes] * len(keys)).granted
    return list(granted.values())


def _plain_memory(count: int, num_bytes: int) -> list[memoryview]:
    """One mapping, cut into equal views, with every page touched."""
    mapping = mmap.mmap(-1, count * num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # as the arena does
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    filler = bytes(num_bytes)
    views = [memory[start : start + num_bytes] for start in range(0, count * num_bytes, num_bytes)]
    for view in views:
        view[:] = filler
    return views


def _fresh_batch(source: random.Random, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Copies of consecutive keys: as a prompt's, they carry no cached hash."""
    start = source.randrange(max(1, len(keys) - _BATCH))
    return [ChunkKey(bytes(bytearray(key))) for key in keys[start : start + _BATCH]]


def _keys(source: random.Random, count: int) -> Iterator[ChunkKey]:
    for _ in range(count):
        yield chunk_key(BlockHash(source.randbytes(32)), GroupId(0))


def _room_goals(meters: dict[EvictionName, Meter], capacity_bytes: int) -> Iterator[Goal]:
    for name, meter in meters.items():
        lost = max(meter.lost_bytes) / capacity_bytes
        yield Goal(f"most room lost when full, {name}", lost * 100, 5.0, "% of the arena")
    for name, meter in meters.items():
        took_s = min(meter.seconds_per_chunk)
        yield Goal(f"reserve, evict and settle, {name}", took_s * 1e6, 50.0, "us/chunk")


def _copy_goals(shares: dict[int, Shares]) -> Iterator[Goal]:
    for size, share in shares.items():
        for name, value in zip(("into", "out of"), share, strict=True):
            title = f"copy {size // KIB:,} KiB {name} the arena"
            yield Goal(title, value, 0.9, "of a plain copy", "at least")


def _extents_series(meters: dict[EvictionName, Meter]) -> Series:
    """Rows by chunk size; each policy's mean and most extents."""

    def row(size: int) -> Iterator[float]:
        for meter in meters.values():
            counts = meter.num_extents.get(size, [0])
            yield from (sum(counts) / len(counts), float(max(counts)))

    columns = itertools.product(meters, ("mean", "most"))
    return Series(
        "Extents per chunk in steady state",
        "chunk bytes",
        tuple(f"{name}, {what}" for name, what in columns),
        tuple((size, tuple(row(size))) for size in MIXTURE),
    )
