"""What a reader rebuilds from the bytes is what rests in the tiers, or it says that it is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.layout import GroupKind
from kvstrata.telemetry.event_consumer import BlockAddress, EventConsumer, NumberedBatch
from kvstrata.telemetry.event_tracker import OffloadingEventsTracker
from kvstrata.telemetry.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEvent,
    KVEventBatch,
    encode_batch,
)
from kvstrata.testing.strategies import chunk_geometries

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.core.ids import BlockHash, ChunkKey, GroupId

TIERS = ("host", "disk", "bucket")
MOST_CHUNKS = 30
Index = Counter[BlockAddress]


@dataclass(frozen=True)
class Chunk:
    """One chunk of one request, with what it should announce."""

    grid: ChunkGrid
    tokens: Sequence[int]
    group_id: GroupId
    index: int
    hashes: tuple[BlockHash, ...]

    @property
    def key(self) -> ChunkKey:
        return self.grid.key(self.group_id, self.index)

    def describe(self, tracker: OffloadingEventsTracker) -> None:
        tracker.describe(self.grid, self.group_id, self.index, tokens=self.tokens, lora=None)

    def addresses(self, tier: str) -> list[BlockAddress]:
        medium = "CPU" if tier == "host" else "STORAGE"
        return [BlockAddress(medium, tier, self.group_id, h) for h in self.hashes]


def request_chunks(geometry: ChunkGeometry, tokens: Sequence[int]) -> list[Chunk]:
    hasher = PrefixHasher(geometry.layout.hash_block_tokens)
    hasher.extend(tokens)
    grid = ChunkGrid(geometry, hasher.hashes)
    chunks = []
    for group in geometry.groups:
        step = group.hashes_per_chunk
        for index in range(min(4, grid.num_chunks(group.group_id))):
            hashes = tuple(hasher.hashes[index * step : (index + 1) * step])
            if group.group.kind is GroupKind.RECURRENT:
                hashes = hashes[-1:]
            chunks.append(Chunk(grid, tokens, group.group_id, index, hashes))
    return chunks


@st.composite
def overlapping_chunks(draw: st.DrawFn) -> list[Chunk]:
    """Chunks of requests that share a start, so that some share keys and some only hashes."""
    geometry = draw(chunk_geometries(max_groups=3))
    largest = max(group.chunk_tokens for group in geometry.groups)
    length = min(3000, 2 * largest)
    shared = draw(st.integers(0, length))
    starts = range(0, 30_000, 10_000)
    requests = [[*range(shared), *range(start + shared, start + length)] for start in starts]
    chunks = [chunk for tokens in requests for chunk in request_chunks(geometry, tokens)]
    return chunks[:MOST_CHUNKS] or request_chunks(geometry, range(largest))


places = st.tuples(st.integers(0, MOST_CHUNKS - 1), st.sampled_from(TIERS))
steps = st.one_of(
    st.tuples(st.just("stored"), places),
    st.tuples(st.just("stored"), places),
    st.tuples(st.just("removed"), places),
    st.tuples(st.sampled_from(["clear", "clear tier", "again"]), places),
    st.tuples(st.sampled_from(["describe", "bare", "forget"]), places),
    st.tuples(st.sampled_from(["take", "lose", "drop", "restart", "catch up", "cut"]), places),
)
Steps = list[tuple[str, tuple[int, str]]]


@dataclass
class Tiers:
    """What truly rests where."""

    tracker: OffloadingEventsTracker = field(default_factory=OffloadingEventsTracker)
    resident: dict[tuple[ChunkKey, str], Chunk] = field(default_factory=dict)

    def apply(self, verb: str, chunk: Chunk, tier: str) -> None:
        if verb in {"stored", "describe"}:
            chunk.describe(self.tracker)
        if verb in {"stored", "bare"}:
            self.tracker.stored(chunk.key, tier)
            self.resident[chunk.key, tier] = chunk
        elif verb == "removed":
            self.tracker.removed(chunk.key, tier)
            self.resident.pop((chunk.key, tier), None)
        elif verb == "forget":
            self.tracker.forget([chunk.key])
        elif verb in {"clear", "clear tier"}:
            self.clear(None if verb == "clear" else tier)
        self.tracker.check_invariants()

    def clear(self, tier: str | None) -> None:
        self.tracker.clear(tier)
        kept = {place: c for place, c in self.resident.items() if tier not in {None, place[1]}}
        self.resident = kept

    def contents(self) -> Index:
        places = self.resident.items()
        return Counter(a for (_, tier), chunk in places for a in chunk.addresses(tier))

    def check_residencies(self) -> None:
        for tier in TIERS:
            keys = {key for key, where in self.resident if where == tier}
            assert self.tracker.residencies(tier) == keys


class Wire:
    """A stream of real bytes that may lose batches, with a replay of the last few."""

    def __init__(self, replay_batches: int) -> None:
        self._replay_batches = replay_batches
        self.consumer = EventConsumer(self._replay)
        self._life = 0
        self.restart()

    def restart(self) -> None:
        self._life += 1
        self._buffer: list[NumberedBatch] = []
        self._next = 0
        self.truths: dict[int, Index] = {-1: Counter()}
        self.consumer.suspect()

    def send(self, events: Iterable[KVEvent], truth: Index, *, is_heard: bool = True) -> None:
        payload = encode_batch(KVEventBatch(1000 * self._life + self._next, tuple(events)))
        batch = NumberedBatch(self._next, payload)
        self.truths[self._next] = truth
        self._next += 1
        self._buffer = [*self._buffer, batch][-self._replay_batches :]
        if is_heard:
            self.consumer.receive(batch)

    def drop(self) -> None:
        """A batch finds no room: its number is never sent."""
        self._next += 1

    def check(self) -> None:
        if self.consumer.is_exact:
            assert self.consumer.index == self.truths[self.consumer.next_number - 1]

    def _replay(self, number: int) -> list[NumberedBatch]:
        return [batch for batch in self._buffer if batch.number >= number]


@given(overlapping_chunks(), st.lists(steps, max_size=40))
def test_the_readers_index_is_what_rests_in_the_tiers(chunks: list[Chunk], steps: Steps) -> None:
    tiers, wire = Tiers(), Wire(replay_batches=1)
    for verb, (number, tier) in steps:
        if verb in {"stored", "removed", "clear", "clear tier"}:
            tiers.apply(verb, chunks[number % len(chunks)], tier)
            tiers.check_residencies()
        elif verb == "take":
            wire.send(tiers.tracker.take_events(), tiers.contents())
            assert wire.consumer.is_exact
            wire.check()
    tiers.clear(None)
    wire.send(tiers.tracker.take_events(), Counter())
    assert not wire.consumer.index
    assert wire.consumer.num_unknown_removals == 0


@given(overlapping_chunks(), st.lists(steps, max_size=40))
def test_descriptions_and_residencies_come_in_any_order(chunks: list[Chunk], steps: Steps) -> None:
    tiers, wire = Tiers(), Wire(replay_batches=1)
    for verb, (number, tier) in steps:
        tiers.apply(verb, chunks[number % len(chunks)], tier)
        wire.send(tiers.tracker.take_events(), Counter())
        assert Counter(wire.consumer.index) <= tiers.contents()
    for chunk in tiers.resident.values():
        chunk.describe(tiers.tracker)
    wire.send(tiers.tracker.take_events(), Counter())
    assert wire.consumer.index == tiers.contents()


@given(overlapping_chunks(), st.lists(steps, max_size=60), st.integers(1, 4))
def test_lost_batches_are_replayed_or_admitted(
    chunks: list[Chunk], steps: Steps, replay_batches: int
) -> None:
    tiers, wire = Tiers(), Wire(replay_batches)
    for verb, (number, tier) in steps:
        if verb in {"stored", "removed", "clear", "clear tier"}:
            tiers.apply(verb, chunks[number % len(chunks)], tier)
        elif verb == "again":
            tiers.tracker.announce_again()
            wire.send([AllBlocksCleared(), *tiers.tracker.take_events()], tiers.contents())
            assert wire.consumer.is_exact
        elif verb in {"take", "lose"}:
            events = tiers.tracker.take_events()
            wire.send(events, tiers.contents(), is_heard=verb == "take")
        elif verb == "drop":
            tiers.tracker.take_events()
            wire.drop()
        elif verb == "restart":
            tiers = Tiers()
            wire.restart()
        elif verb == "catch up":
            wire.consumer.catch_up()
        elif verb == "cut":
            wire.consumer.suspect()
        wire.check()


@given(overlapping_chunks(), st.lists(st.booleans(), min_size=1, max_size=20))
def test_a_replay_that_reaches_back_fills_every_gap(chunks: list[Chunk], heard: list[bool]) -> None:
    tiers, wire = Tiers(), Wire(replay_batches=len(heard) + 1)
    for number, is_heard in enumerate([*heard, True]):
        tiers.apply("stored", chunks[number % len(chunks)], TIERS[number % 3])
        wire.send(tiers.tracker.take_events(), tiers.contents(), is_heard=is_heard)
    assert wire.consumer.is_exact
    wire.check()


@given(overlapping_chunks())
def test_a_stored_event_carries_the_tokens_of_its_hashes(chunks: list[Chunk]) -> None:
    for chunk in chunks:
        tiers = Tiers()
        tiers.apply("stored", chunk, "host")
        (event,) = tiers.tracker.take_events()
        assert isinstance(event, BlockStored)
        stop = (chunk.index + 1) * chunk.grid.geometry.groups[chunk.group_id].chunk_tokens
        start = stop - event.block_size * len(event.block_hashes)
        assert event.token_ids == tuple(chunk.tokens[start:stop])
        assert event.block_hashes == chunk.hashes
        assert (event.parent_block_hash or b"") == chunk.grid.hash_before(start)
