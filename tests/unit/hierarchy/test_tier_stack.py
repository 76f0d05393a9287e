"""The stack over two ranks and two tiers, with real threads and arenas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import ChunkLabel, Rank
from kvstrata.core.lookups import ChunkLookup
from kvstrata.errors import ChunkCorrupt, TierTimeout
from kvstrata.hierarchy.breaker import Breaker, BreakerRules, BreakerState
from kvstrata.hierarchy.changes import Changes
from kvstrata.hierarchy.known_chunks import KnownChunks, Presence
from kvstrata.hierarchy.lower_tier import LowerTier
from kvstrata.hierarchy.ranks import LocalChannel, RankedTier
from kvstrata.hierarchy.tier_io import TierIO
from kvstrata.hierarchy.tier_stack import TierStack
from kvstrata.interfaces import ChunkStore
from kvstrata.policies.lru import LruPolicy
from kvstrata.testing.chunks import a_label, content, filled, within
from kvstrata.testing.memory_store import MemoryStore, Shelf
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.tiers.room import PAGE_BYTES
from kvstrata.tiers.wrapping import CountingStore, DelayedStore, FailingStore, WrappedStore

if TYPE_CHECKING:
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline, TierOutcome

RANKS = 2
PAGES = 40
LABELS = [a_label(n, payload_bytes=6000) for n in range(8)]
KEYS = [label.key for label in LABELS]
READY, ARRIVING, ABSENT = ChunkLookup.READY, ChunkLookup.ARRIVING, ChunkLookup.ABSENT
UNKNOWN, FAILED = ChunkLookup.UNKNOWN, ChunkLookup.FAILED

Wrap = Callable[[ChunkStore], ChunkStore]


class Bench:
    """A stack with its arenas and stores within reach."""

    def __init__(
        self,
        *wraps: tuple[str, Wrap],
        pages: int = PAGES,
        rules: BreakerRules | None = None,
        num_threads: int = 2,
    ) -> None:
        self.num_threads = num_threads
        self.arenas = [HostArena(pages * PAGE_BYTES) for _ in range(RANKS)]
        self.host = HostMemoryIndex(pages * PAGE_BYTES, LruPolicy(pages * PAGE_BYTES))
        self.shelves: dict[str, Shelf] = {}
        self.stores: dict[str, list[ChunkStore]] = {}
        self.tiers = [self._tier(name, wrap, rules) for name, wrap in wraps]
        self.stack = TierStack(self.host, self.tiers, time.monotonic, write_s=5)

    def _tier(self, name: str, wrap: Wrap, rules: BreakerRules | None) -> LowerTier:
        shelf = self.shelves.setdefault(name, {})
        stores = [wrap(MemoryStore(Rank(index, RANKS), shelf)) for index in range(RANKS)]
        self.stores[name] = stores
        ios = [TierIO(name, store, num_threads=self.num_threads) for store in stores]
        return LowerTier(
            name,
            RankedTier(
                [LocalChannel(io, arena) for io, arena in zip(ios, self.arenas, strict=True)]
            ),
            Breaker(time.monotonic, rules),
            KnownChunks(time.monotonic, absent_s=0.2),
        )

    def fill_host(self, labels: Sequence[ChunkLabel]) -> None:
        """As if the ranks had stored these chunks, each its own bytes."""
        room = self.host.reserve([x.key for x in labels], [x.payload_bytes for x in labels])
        for label in labels:
            for rank, arena in enumerate(self.arenas):
                copy_into(arena, label, room.granted[label.key], rank)
        self.host.settle(list(room.granted))

    def in_host(self, label: ChunkLabel, rank: int) -> bytes:
        return content(self.arenas[rank].buffer(label, self.host.extents(label.key)))

    def poll_until(self, condition: Callable[[Changes], bool], seconds: float = 10) -> Changes:
        end = time.monotonic() + seconds
        total = Changes()
        while not condition(total):
            assert time.monotonic() < end, f"waited in vain: {total}"
            total = together(total, self.stack.poll())
            self.stack.check_invariants()
            time.sleep(0.001)
        return total

    def demoted(self, labels: Sequence[ChunkLabel]) -> None:
        """Store chunks, write them down everywhere, and drop them from host memory."""
        self.fill_host(labels)
        self.stack.demote(labels)
        self.poll_until(lambda c: len(c.written) == len(labels) * len(self.tiers))
        assert set(self.host.remove([x.key for x in labels])) == {x.key for x in labels}


def together(one: Changes, other: Changes) -> Changes:
    return Changes(
        arrived=one.arrived + other.arrived,
        lost=one.lost + other.lost,
        evicted=one.evicted + other.evicted,
        written=one.written + other.written,
        faults=one.faults + other.faults,
    )


def copy_into(arena: HostArena, label: ChunkLabel, extents: object, rank: int) -> None:
    source, offset = content(filled(label, seed=rank)), 0
    for part in arena.buffer(label, extents).payload():  # type: ignore[arg-type]
        part[:] = source[offset : offset + part.nbytes]
        offset += part.nbytes


def plain(store: ChunkStore) -> ChunkStore:
    return store


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(*wraps: tuple[str, Wrap], **settings: object) -> Bench:
        made.append(Bench(*wraps, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield bench
    for each in made:
        each.stack.close()


def test_chunks_go_down_and_come_up_equal_on_every_rank(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain))
    bench.demoted(LABELS)
    assert bench.stack.lookup(KEYS) == bytes([ARRIVING] * 8), "there, but not checked yet"

    bench.stack.promote(LABELS, within(10))
    changes = bench.poll_until(lambda c: len(c.arrived) == 8)

    assert {key for _, key in changes.arrived} == set(KEYS)
    assert bench.stack.lookup(KEYS) == bytes([READY] * 8)
    for label in LABELS:
        for rank in range(RANKS):
            assert bench.in_host(label, rank) == content(filled(label, seed=rank))
    assert bench.tiers[0].bytes_per_s > 0


def test_unknown_chunks_are_asked_about_without_waiting(make: Callable[..., Bench]) -> None:
    bench = make(("shared", plain))
    other = make(("shared", plain))
    bench.demoted(LABELS[:3])
    other.shelves["shared"].update(bench.shelves["shared"])
    assert other.stack.lookup(KEYS[:4]) == bytes([UNKNOWN] * 4)

    other.stack.ask(KEYS[:4], within(10))
    assert other.stack.lookup(KEYS[:4]) == bytes([UNKNOWN] * 4)
    other.poll_until(lambda _: other.stack.lookup(KEYS[:1]) == bytes([ARRIVING]))

    assert other.stack.lookup(KEYS[:4]) == bytes([ARRIVING] * 3 + [ABSENT])
    time.sleep(0.25)
    assert other.stack.lookup(KEYS[3:4]) == bytes([UNKNOWN]), "an absence is believed for a while"


def test_a_chunk_of_which_a_rank_lacks_its_part_is_lost_not_served(
    make: Callable[..., Bench],
) -> None:
    bench = make(("disk", plain))
    bench.demoted(LABELS[:2])
    del bench.shelves["disk"][KEYS[0], Rank(1, RANKS)]

    bench.stack.promote(LABELS[:2], within(10))
    changes = bench.poll_until(lambda c: len(c.arrived) + len(c.lost) == 2)

    assert [key for _, key in changes.arrived] == [KEYS[1]]
    assert changes.lost == (KEYS[0],)
    assert bench.stack.lookup(KEYS[:2]) == bytes([ABSENT, READY])


def test_one_prefix_is_put_together_from_several_tiers(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain), ("server", plain))
    bench.demoted(LABELS[:4])
    for key in KEYS[:2]:
        for rank in range(RANKS):
            del bench.shelves["disk"][key, Rank(rank, RANKS)]
    bench.tiers[0].known.missed(KEYS[:2])

    bench.stack.promote(LABELS[:4], within(10))
    bench.poll_until(lambda c: len(c.arrived) == 4)

    assert all(bench.in_host(x, 0) == content(filled(x, seed=0)) for x in LABELS[:4])


def test_the_tier_worth_most_is_read(make: Callable[..., Bench]) -> None:
    bench = make(("slow", CountingStore), ("fast", CountingStore))
    bench.demoted(LABELS[:1])
    bench.tiers[0].bytes_per_s, bench.tiers[1].bytes_per_s = 1e6, 9e6
    bench.tiers[0].weight = 8.0

    bench.stack.promote(LABELS[:1], within(10))
    bench.poll_until(lambda c: bool(c.arrived))

    counts = [bench.stores[name][0].counts["read calls"] for name in ("slow", "fast")]  # type: ignore[attr-defined]
    assert counts == [0, 1]


def test_when_one_tier_fails_the_next_is_read(make: Callable[..., Bench]) -> None:
    bad: set[ChunkKey] = set()
    error = ChunkCorrupt("disk", "made bad", [KEYS[0]])
    bench = make(
        ("disk", lambda s: FailingStore(s, lambda key: key in bad, error)), ("server", plain)
    )
    bench.demoted(LABELS[:1])
    bad.add(KEYS[0])

    bench.stack.promote(LABELS[:1], within(10))
    changes = bench.poll_until(lambda c: bool(c.arrived))

    assert [key for _, key in changes.arrived] == [KEYS[0]]
    assert [fault.tier for fault in changes.faults] == ["disk"]
    assert bench.tiers[0].known.presence(KEYS[0]) is Presence.BAD
    assert bench.tiers[0].breaker.state is BreakerState.CLOSED, "one bad chunk is no bad tier"


def test_a_corrupt_chunk_is_reported_once_and_not_asked_for_again(
    make: Callable[..., Bench],
) -> None:
    bad: set[ChunkKey] = set()
    error = ChunkCorrupt("disk", "made bad", [KEYS[0]])
    bench = make(("disk", lambda s: FailingStore(s, lambda key: key in bad, error)))
    bench.demoted(LABELS[:1])
    bad.add(KEYS[0])

    bench.stack.promote(LABELS[:1], within(10))
    changes = bench.poll_until(lambda c: bool(c.lost))
    assert len(changes.faults) == 1
    assert bench.stack.lookup(KEYS[:1]) == bytes([FAILED])
    bench.tiers[0].known.found(KEYS[:1])  # as if another process had written it again
    bench.stack.promote(LABELS[:1], within(10))
    again = bench.poll_until(lambda c: bool(c.lost))
    assert again.faults == (), "reported before"


def test_a_hung_read_is_lost_at_its_deadline_and_its_room_freed_when_it_returns(
    make: Callable[..., Bench],
) -> None:
    delays: list[DelayedStore] = []

    def slow(store: ChunkStore) -> ChunkStore:
        delays.append(DelayedStore(store, 0.0))
        return delays[-1]

    bench = make(("disk", slow))
    bench.demoted(LABELS[:1])
    free = bench.host.free_bytes
    for store in delays:
        store.delay_s = 2.0

    start = time.monotonic()
    bench.stack.promote(LABELS[:1], within(0.2))
    changes = bench.poll_until(lambda c: bool(c.lost))
    assert time.monotonic() - start < 1.5
    assert isinstance(changes.faults[0].error, TierTimeout)
    assert bench.stack.lookup(KEYS[:1]) == bytes([FAILED])
    assert bench.host.free_bytes < free, "the medium may still write there"
    bench.poll_until(lambda _: bench.host.free_bytes == free)
    assert bench.stack.lookup(KEYS[:1]) == bytes([ARRIVING]), "worth another try"


def test_a_tier_that_fails_is_left_alone_and_comes_back_by_itself(
    make: Callable[..., Bench],
) -> None:
    broken: set[ChunkKey] = set()
    rules = BreakerRules(max_faults=1, first_pause_s=0.2)
    bench = make(("disk", lambda s: FailingStore(s, lambda key: key in broken)), rules=rules)
    bench.demoted(LABELS[:2])
    broken.update(KEYS)
    bench.stack.promote(LABELS[:1], within(10))
    bench.poll_until(lambda c: bool(c.lost))
    assert bench.tiers[0].breaker.state is BreakerState.OPEN
    assert bench.stack.lookup(KEYS[:2]) == bytes([ABSENT] * 2), "as if it were not there"

    broken.clear()
    bench.poll_until(lambda _: bench.stack.lookup(KEYS[1:2]) == bytes([ARRIVING]))
    bench.stack.promote(LABELS[1:2], within(10))
    bench.poll_until(lambda c: bool(c.arrived))

    assert str(bench.tiers[0].breaker.state) == "closed"


def test_writes_are_dropped_when_too_many_wait(make: Callable[..., Bench]) -> None:
    bench = make(("disk", lambda s: DelayedStore(s, 0.1)))
    bench.tiers[0].max_waiting_bytes = 3 * 6000
    bench.fill_host(LABELS)

    bench.stack.demote(LABELS)
    bench.poll_until(lambda c: len(c.written) == 3)

    assert bench.stack.num_dropped == {"disk": 5}
    bench.stack.demote(LABELS)
    bench.poll_until(lambda c: len(c.written) == 3)


def test_a_chunk_is_written_once_however_often_it_is_demoted(make: Callable[..., Bench]) -> None:
    bench = make(("disk", CountingStore))
    bench.fill_host(LABELS[:2])
    for _ in range(3):
        bench.stack.demote(LABELS[:2])
    bench.poll_until(lambda c: len(c.written) == 2)
    bench.stack.demote(LABELS[:2])

    counts = bench.stores["disk"][0].counts  # type: ignore[attr-defined]
    assert counts["write chunks"] == 2


def test_promotions_evict_what_nobody_holds_and_stop_without_room(
    make: Callable[..., Bench],
) -> None:
    bench = make(("disk", plain), pages=6)
    bench.demoted(LABELS[:3])
    bench.demoted(LABELS[3:6])
    bench.stack.promote(LABELS[:3], within(10))
    bench.poll_until(lambda c: len(c.arrived) == 3)
    bench.host.lease(KEYS[:2])

    bench.stack.promote(LABELS[3:6], within(10))
    changes = bench.poll_until(lambda c: bool(c.arrived))

    assert changes.evicted == (KEYS[2],)
    assert [key for _, key in changes.arrived] == [KEYS[3]]
    assert bench.stack.lookup(KEYS[4:6]) == bytes([ARRIVING] * 2)


def test_what_is_being_written_does_not_leave(make: Callable[..., Bench]) -> None:
    bench = make(("disk", lambda s: DelayedStore(s, 0.2)), pages=4)
    bench.fill_host(LABELS[:2])
    bench.stack.demote(LABELS[:2])

    assert bench.host.reserve(KEYS[2:3], [6000]).refused == frozenset(KEYS[2:3])
    bench.poll_until(lambda c: len(c.written) == 2)
    assert bench.host.reserve(KEYS[2:3], [6000]).granted


def test_a_chunk_named_twice_counts_once(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain))
    bench.fill_host(LABELS[:1])
    bench.stack.demote([LABELS[0]] * 3)
    bench.poll_until(lambda c: len(c.written) == 1)
    assert bench.host.remove(KEYS[:1] * 2) == (KEYS[0],)

    bench.stack.promote([LABELS[0]] * 3, within(10))
    changes = bench.poll_until(lambda c: bool(c.arrived))

    assert [key for _, key in changes.arrived] == [KEYS[0]]
    assert bench.host.remove(KEYS[:1]) == (KEYS[0],)
    assert bench.host.free_bytes == PAGES * PAGE_BYTES


def test_a_request_does_not_evict_its_own_prefix(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain), pages=4)
    bench.demoted(LABELS[1:2])
    bench.fill_host(LABELS[:1])
    bench.fill_host(LABELS[2:3])

    bench.stack.promote(LABELS[:2], within(10))
    changes = bench.poll_until(lambda c: bool(c.arrived))

    assert changes.evicted == (KEYS[2],), "not the older prefix"
    assert bench.stack.lookup(KEYS[:2]) == bytes([READY, READY])


def test_what_finds_no_room_is_lost_at_once_and_evicts_nothing(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain), pages=4)
    bench.demoted(LABELS[:1])
    bench.fill_host(LABELS[1:3])
    bench.host.lease(KEYS[1:2])
    big = a_label(50, payload_bytes=3 * PAGE_BYTES)
    bench.tiers[0].known.found([big.key])

    bench.stack.promote([big], within(10))
    changes = bench.poll_until(lambda c: bool(c.lost))

    assert (changes.lost, changes.evicted) == ((big.key,), ())
    assert bench.stack.lookup(KEYS[2:3]) == bytes([READY])


def test_an_idle_scheduler_does_not_make_a_tier_look_slow(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain), rules=BreakerRules(max_faults=1, slow_s=0.2))
    bench.fill_host(LABELS[:2])
    bench.stack.demote(LABELS[:2])
    time.sleep(0.4)
    bench.poll_until(lambda c: len(c.written) == 2)

    assert bench.tiers[0].breaker.state is BreakerState.CLOSED


def test_a_callers_short_deadline_is_not_the_tiers_fault(make: Callable[..., Bench]) -> None:
    bench = make(("disk", plain), rules=BreakerRules(max_faults=1))
    for _ in range(3):
        bench.stack.ask(KEYS, within(-1))
        bench.poll_until(lambda _: bench.tiers[0].known.presence(KEYS[0]) is not Presence.ASKED)

    assert bench.tiers[0].breaker.state is BreakerState.CLOSED


def test_a_hung_tier_keeps_only_what_it_has_in_its_hands(make: Callable[..., Bench]) -> None:
    delays: list[DelayedStore] = []

    def slow(store: ChunkStore) -> ChunkStore:
        delays.append(DelayedStore(store, 0.0))
        return delays[-1]

    bench = make(("disk", slow))
    bench.demoted(LABELS)
    for store in delays:
        store.delay_s = 0.8
    bench.stack.promote(LABELS, within(0.1))
    bench.poll_until(lambda c: len(c.lost) == len(LABELS))

    held = PAGES * PAGE_BYTES - bench.host.free_bytes
    assert 0 < held <= 4 * 2 * PAGE_BYTES, "two threads on each of two ranks, two pages a chunk"
    bench.poll_until(lambda _: bench.host.free_bytes == PAGES * PAGE_BYTES)


class LateAnswers(WrappedStore):
    """Looks at once, but says what it saw only when it is let go."""

    may_answer = threading.Event()

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        outcome = super().find(keys, deadline)
        self.may_answer.wait(10)
        return outcome


def test_an_answer_that_a_write_has_outrun_is_not_believed(make: Callable[..., Bench]) -> None:
    bench = make(("disk", LateAnswers), num_threads=3)
    LateAnswers.may_answer.clear()
    bench.stack.ask(KEYS[:1], within(10))
    time.sleep(0.05)  # by now it has seen that there is nothing
    bench.fill_host(LABELS[:1])
    bench.stack.demote(LABELS[:1])
    bench.poll_until(lambda c: bool(c.written))

    LateAnswers.may_answer.set()
    gone: list[tuple[str, ChunkKey]] = []
    end = time.monotonic() + 10
    while bench.stack.num_pending or bench.stack.is_in_doubt(KEYS[0]):
        assert time.monotonic() < end, "it is asked again, and then it is known"
        gone.extend(bench.stack.poll().gone)

    assert not gone
    assert bench.tiers[0].has(KEYS[0])


def test_the_newest_of_two_reports_counts(make: Callable[..., Bench]) -> None:
    """Both are taken in at once: nothing was there, then it was written."""
    bench = make(("disk", plain))
    bench.stack.ask(KEYS[:1], within(10))
    time.sleep(0.1)
    bench.fill_host(LABELS[:1])
    bench.stack.demote(LABELS[:1])
    time.sleep(0.2)

    changes = bench.stack.poll()

    assert changes.written == (("disk", KEYS[0]),)
    assert not changes.gone
    assert bench.tiers[0].has(KEYS[0])
