from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.core.ids import ChunkKey
from kvstrata.core.lookups import ChunkLookup
from kvstrata.errors import ConfigError
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.registry import make_policy
from kvstrata.testing.chunks import a_label, content, filled
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.tiers.room import PAGE_BYTES, Extent, Room

READY, ARRIVING, ABSENT = ChunkLookup.READY, ChunkLookup.ARRIVING, ChunkLookup.ABSENT


def keys(*numbers: int) -> list[ChunkKey]:
    return [ChunkKey(b"key%d" % number) for number in numbers]


def an_index(pages: int) -> HostMemoryIndex:
    return HostMemoryIndex(pages * PAGE_BYTES, LruPolicy(pages * PAGE_BYTES))


def stored(index: HostMemoryIndex, *numbers: int, pages: int = 1) -> None:
    reservation = index.reserve(keys(*numbers), [pages * PAGE_BYTES] * len(numbers))
    index.settle(reservation.granted)


def test_room_is_given_from_the_shortest_run_that_fits() -> None:
    room = Room(10 * PAGE_BYTES)
    one, two = room.take(3 * PAGE_BYTES), room.take(2 * PAGE_BYTES)
    assert (one, two) == ((Extent(0, 3),), (Extent(3, 2),))
    assert one is not None
    room.give_back(one)

    assert room.take(PAGE_BYTES + 1) == (Extent(0, 2),)
    assert room.take(5 * PAGE_BYTES) == (Extent(5, 5),)
    assert room.take(PAGE_BYTES) == (Extent(2, 1),)
    assert room.take(1) is None
    room.check_invariants()


def test_splintered_room_is_put_together() -> None:
    room = Room(6 * PAGE_BYTES)
    pieces = [room.take(PAGE_BYTES) for _ in range(6)]
    for piece in pieces[::2]:
        assert piece is not None
        room.give_back(piece)

    taken = room.take(3 * PAGE_BYTES)

    assert taken is not None
    assert sorted(taken) == [Extent(0, 1), Extent(2, 1), Extent(4, 1)]
    assert room.free_pages == 0


def test_a_chunk_arrives_before_it_is_ready() -> None:
    index = an_index(4)
    reservation = index.reserve(keys(1, 2), [PAGE_BYTES, PAGE_BYTES])

    assert index.lookup(keys(1, 2, 3)) == bytes([ARRIVING, ARRIVING, ABSENT])
    assert set(reservation.granted) == set(keys(1, 2))
    index.settle(keys(1), failed=keys(2))
    assert index.lookup(keys(1, 2, 3)) == bytes([READY, ABSENT, ABSENT])
    assert index.free_bytes == 3 * PAGE_BYTES
    index.check_invariants()


def test_the_least_recent_leave_suffix_first() -> None:
    index = an_index(4)
    stored(index, 1, 2, 3, 4)

    reservation = index.reserve(keys(5), [PAGE_BYTES])

    assert reservation.evicted == tuple(keys(4))


def test_leased_chunks_stay() -> None:
    index = an_index(2)
    stored(index, 1, 2)
    index.lease(keys(1, 2))

    refused = index.reserve(keys(3), [PAGE_BYTES])
    assert refused.refused == frozenset(keys(3))
    index.release(keys(1))
    assert index.reserve(keys(3), [PAGE_BYTES]).evicted == tuple(keys(1))


def test_only_ready_chunks_can_be_leased_all_or_none() -> None:
    index = an_index(4)
    stored(index, 1)
    index.reserve(keys(2), [PAGE_BYTES])
    with pytest.raises(KeyError):
        index.lease(keys(1, 2))

    assert index.remove(keys(1)) == tuple(keys(1)), "it was not held"


def test_what_is_known_is_not_reserved_again_nor_evicted_for_the_rest() -> None:
    index = an_index(2)
    stored(index, 1, 2)

    reservation = index.reserve(keys(1, 2, 3), [PAGE_BYTES] * 3)

    assert reservation.known == frozenset(keys(1, 2))
    assert reservation.refused == frozenset(keys(3))
    assert not reservation.evicted


def test_a_suffix_is_not_granted_without_its_prefix() -> None:
    index = an_index(4)

    reservation = index.reserve(keys(1, 2, 3), [PAGE_BYTES, 9 * PAGE_BYTES, PAGE_BYTES])

    assert set(reservation.granted) == set(keys(1))
    assert reservation.refused == frozenset(keys(2, 3))


def test_what_arrives_is_not_evicted_or_removed() -> None:
    index = an_index(1)
    index.reserve(keys(1), [PAGE_BYTES])

    assert index.reserve(keys(2), [PAGE_BYTES]).refused == frozenset(keys(2))
    assert index.remove(keys(1)) == ()


class HostMachine(RuleBasedStateMachine):
    """Any order of calls, against sets of keys."""

    PAGES = 60

    def __init__(self) -> None:
        super().__init__()
        self.index = HostMemoryIndex(
            self.PAGES * PAGE_BYTES, make_policy("arc", self.PAGES * PAGE_BYTES)
        )
        self.arriving: set[ChunkKey] = set()
        self.ready: set[ChunkKey] = set()
        self.leases: list[list[ChunkKey]] = []

    @rule(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True), data=st.data())
    def reserve(self, numbers: list[int], data: st.DataObject) -> None:
        wanted = keys(*numbers)
        sizes = [data.draw(st.sampled_from([1, 5000, 40_000, 200_000])) for _ in wanted]
        held = {key for lease in self.leases for key in lease}
        reservation = self.index.reserve(wanted, sizes)
        assert not held & set(reservation.evicted)
        assert not set(wanted) & set(reservation.evicted)
        assert reservation.known == (self.arriving | self.ready) & set(wanted)
        assert set(reservation.evicted) <= self.ready
        self.ready -= set(reservation.evicted)
        self.arriving |= set(reservation.granted)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        settled = data.draw(st.sets(st.sampled_from(sorted(self.arriving)), min_size=1))
        failed = data.draw(st.sets(st.sampled_from(sorted(settled))))
        self.index.settle(sorted(settled - failed), failed)
        self.arriving -= settled
        self.ready |= settled - failed

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.lists(st.sampled_from(sorted(self.ready)), min_size=1, unique=True))
        self.index.lease(lease)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.index.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sets(st.sampled_from(sorted(self.ready))))
        held = {key for lease in self.leases for key in lease}
        assert set(self.index.remove(wanted)) == wanted - held
        self.ready -= wanted - held

    @invariant()
    def index_agrees_with_the_sets(self) -> None:
        self.index.check_invariants()
        everything = keys(*range(41))
        expected = [
            READY if key in self.ready else ARRIVING if key in self.arriving else ABSENT
            for key in everything
        ]
        assert self.index.lookup(everything) == bytes(expected)


TestHost = HostMachine.TestCase


def test_an_arena_keeps_bytes_in_scattered_extents() -> None:
    arena = HostArena(20 * PAGE_BYTES + 17)
    assert arena.num_bytes == 20 * PAGE_BYTES
    label = a_label(1, payload_bytes=10_000)
    buffer = arena.buffer(label, [Extent(7, 1), Extent(2, 2)])
    source = content(filled(label))
    offset = 0
    for part in buffer.payload():
        part[:] = source[offset : offset + part.nbytes]
        offset += part.nbytes

    assert content(arena.buffer(label, [Extent(7, 1), Extent(2, 2)])) == source


def test_a_shared_arena_is_seen_by_another_process() -> None:
    name = f"kvstrata-test-{id(object())}"
    arena = HostArena(4 * PAGE_BYTES, shared_name=name)
    (part,) = arena.parts([Extent(1, 1)])
    part[:5] = b"hello"
    code = f"print(open('/dev/shm/{name}', 'rb').read()[{PAGE_BYTES}:{PAGE_BYTES}+5])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    part.release()
    arena.close()

    assert run.stdout.strip() == "b'hello'"
    assert not Path(f"/dev/shm/{name}").exists()  # noqa: S108


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host\.capacity"):
        HostArena(2**50, shared_name=f"kvstrata-test-{id(object())}")


def test_pinning_without_a_gpu_is_no_fault() -> None:
    arena = HostArena(mmap.PAGESIZE)
    assert arena.pin() is False
    arena.close()
