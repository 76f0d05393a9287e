"""Stores against an oracle, and the ledger as a state machine against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid, GroupChunks
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.layout import GroupKind
from kvstrata.core.lookups import ChunkLookup, to_codes
from kvstrata.planning.load_plan import LoadBounds, choose_load
from kvstrata.planning.request_ledger import (
    MAX_ATTEMPTS,
    ChunkProgress,
    ChunkRef,
    RequestLedger,
    StateOffer,
)
from kvstrata.planning.store_plan import choose_stores
from kvstrata.testing.builders import a_grid
from kvstrata.testing.strategies import chunk_geometries, request_lengths


def reads(chunks: GroupChunks, chunk: int, length: int) -> bool:
    """Whether a window hit of `length` depends on a chunk, token by token."""
    window = chunks.group.window_tokens
    assert window is not None
    margin = chunks.hash_block_tokens if chunks.group.is_draft else 0
    first, last = max(0, length - window + 1), length + margin - 1
    size = chunks.chunk_tokens
    return first <= last and max(first, chunk * size) <= min(last, (chunk + 1) * size - 1)


def oracle_stores(
    geometry: ChunkGeometry, hashed: int, start: int, computed: int, states: set[int]
) -> set[tuple[int, int]]:
    """Everything worth storing after one step from `start` to `computed`, nothing stored before.

    `states` are the lengths at which every recurrent group offers a state.
    """
    end = min(hashed, computed)
    stride = geometry.layout.hit_stride_tokens
    anchors = {n for n in states if n <= end and n % stride == 0 and n > 0}
    if not geometry.recurrent:
        anchors = set(range(stride, end + 5000, stride))
    wanted: set[tuple[int, int]] = set()
    for chunks in geometry.groups:
        size, group = chunks.chunk_tokens, chunks.group
        for chunk in range(end // size):
            if group.kind is GroupKind.FULL:
                wanted.add((chunks.group_id, chunk))
            elif group.kind is GroupKind.RECURRENT:
                if (chunk + 1) * size in anchors:
                    wanted.add((chunks.group_id, chunk))
            else:
                assert group.window_tokens is not None
                oldest_seen = max(0, start - group.window_tokens + 1)
                first_block_kept = oldest_seen // group.block_tokens
                is_kept = chunk * size >= first_block_kept * group.block_tokens
                if is_kept and any(reads(chunks, chunk, n) for n in anchors):
                    wanted.add((chunks.group_id, chunk))
    return wanted


@given(st.data())
def test_stores_are_exactly_what_a_later_hit_can_use(data: st.DataObject) -> None:
    geometry = data.draw(chunk_geometries(max_groups=5))
    num_tokens = data.draw(request_lengths(geometry).map(lambda n: min(n, 3000)))
    computed = data.draw(st.just(num_tokens) | st.integers(0, num_tokens))
    start = data.draw(st.just(0) | st.integers(0, computed))
    stride = geometry.layout.hit_stride_tokens
    multiples = list(range(stride, computed + 1, stride))[-40:] or [stride]
    states = data.draw(st.sets(st.sampled_from(multiples) | st.integers(0, 4000), max_size=3))
    ledger = RequestLedger(a_grid(geometry, num_tokens))

    ledger.advance(start)
    ledger.advance(computed)
    for chunks in geometry.recurrent:
        for boundary in states:
            ledger.offer_state(StateOffer(chunks.group_id, boundary))
    plan = choose_stores(ledger)

    hashed = ledger.grid.hashed_tokens
    found = {tuple(ref) for ref in plan.chunks}
    assert found == oracle_stores(geometry, hashed, start, computed, states)
    assert len(found) == len(plan.chunks)


class LedgerMachine(RuleBasedStateMachine):
    """A request's life in any order, against sets of chunks."""

    @initialize(geometry=chunk_geometries(max_groups=4))
    def begin_request(self, geometry: ChunkGeometry) -> None:
        self.geometry = geometry
        self.begin_another()

    @precondition(lambda self: self.has_ended and not self.in_flight)
    @rule()
    def begin_another(self) -> None:
        geometry = self.geometry
        self.hasher = PrefixHasher(geometry.layout.hash_block_tokens)
        self.hasher.extend(range(600))
        self.ledger = RequestLedger(ChunkGrid(geometry, self.hasher.hashes))
        self.computed = 0
        self.in_flight: set[ChunkRef] = set()
        self.stored: set[ChunkRef] = set()
        self.failures: dict[ChunkRef, int] = {}
        self.given_up: set[ChunkRef] = set()
        self.refused: set[ChunkRef] = set()
        self.offered: set[ChunkRef] = set()
        self.has_ended = False

    def is_running(self) -> bool:
        return not self.has_ended

    @precondition(is_running)
    @rule(tokens=st.integers(0, 300), data=st.data())
    def advance(self, tokens: int, data: st.DataObject) -> None:
        self.computed += tokens
        self.hasher.extend(range(max(0, self.computed - self.hasher.num_tokens)))
        self.ledger.advance(self.computed)
        self.offered = set()
        for chunks in self.geometry.recurrent:
            boundary = self.computed - self.computed % chunks.chunk_tokens
            if boundary and data.draw(st.booleans()):
                self.ledger.offer_state(StateOffer(chunks.group_id, boundary))
                self.offered.add(ChunkRef(chunks.group_id, boundary // chunks.chunk_tokens - 1))

    @precondition(is_running)
    @rule()
    def preempt(self) -> None:
        self.ledger.preempt()
        self.computed, self.offered = 0, set()

    @precondition(lambda self: not self.has_ended and self.computed == 0)
    @rule(local=st.integers(0, 200), data=st.data())
    def resume(self, local: int, data: st.DataObject) -> None:
        """From a hit over what is stored, by this request or meanwhile by another."""
        lookups = self.ledger.grid.lookup(lambda keys: to_codes([ChunkLookup.ABSENT] * len(keys)))
        rows = [bytearray(codes) for codes in lookups]
        elsewhere = (
            data.draw(st.sets(st.sampled_from(sorted(self.in_flight)))) if self.in_flight else set()
        )
        for ref in self.stored | elsewhere:
            rows[ref.group_id][ref.chunk] = ChunkLookup.READY
        codes = tuple(to_codes(map(ChunkLookup, row)) for row in rows)
        plan = choose_load(self.geometry, codes, LoadBounds(self.hasher.num_tokens, local))
        self.ledger.resume(plan)
        self.computed = plan.num_tokens

    @precondition(is_running)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        plan = choose_stores(self.ledger)
        taken = self.in_flight | self.stored | self.given_up
        for ref in plan.chunks:
            chunks = self.geometry.groups[ref.group_id]
            assert ref not in taken
            assert chunks.tokens(ref.chunk).stop <= self.computed
            if chunks.group.kind is GroupKind.RECURRENT:
                assert ref in self.offered
        begun = set(data.draw(st.lists(st.sampled_from(plan.chunks)))) if plan.chunks else set()
        self.check_nothing_is_forgotten(set(plan.chunks))
        self.ledger.begin(begun)
        self.in_flight |= begun
        self.refused |= set(plan.chunks) - begun

    def check_nothing_is_forgotten(self, planned: set[ChunkRef]) -> None:
        """Every complete chunk of a full group is stored, under way, planned, or was refused."""
        known = planned | self.in_flight | self.stored | self.given_up | self.refused
        end = min(self.computed, self.ledger.grid.hashed_tokens)
        for chunks in self.geometry.groups:
            if chunks.group.kind is GroupKind.FULL:
                complete = {ChunkRef(chunks.group_id, i) for i in range(end // chunks.chunk_tokens)}
                assert complete <= known

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Also after the end: stores in flight are reported whatever became of the request."""
        settled = data.draw(st.sets(st.sampled_from(sorted(self.in_flight)), min_size=1))
        failed = data.draw(st.sets(st.sampled_from(sorted(settled))))
        self.ledger.settle(settled - failed, failed)
        self.in_flight -= settled
        self.stored |= settled - failed
        for ref in failed:
            self.failures[ref] = self.failures.get(ref, 0) + 1
            if self.failures[ref] >= MAX_ATTEMPTS:
                self.given_up.add(ref)

    @precondition(is_running)
    @rule(is_abort=st.booleans())
    def finish_or_abort(self, *, is_abort: bool) -> None:
        """A finishing request plans once more; an aborted one does not."""
        if not is_abort:
            last = choose_stores(self.ledger).chunks
            self.check_nothing_is_forgotten(set(last))
            self.ledger.begin(last)
            self.in_flight |= set(last)
        self.ledger.end()
        self.computed, self.offered, self.has_ended = 0, set(), True

    @invariant()
    def ledger_agrees_with_the_sets(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.computed_tokens == self.computed
        assert self.ledger.num_in_flight == len(self.in_flight)
        assert self.ledger.has_ended == self.has_ended
        for refs, progress in (
            (self.in_flight, ChunkProgress.IN_FLIGHT),
            (self.stored, ChunkProgress.STORED),
            (self.given_up, ChunkProgress.GIVEN_UP),
        ):
            assert all(self.ledger.progress(ref) is progress for ref in refs)
        if self.has_ended:
            assert not choose_stores(self.ledger).chunks


TestLedger = LedgerMachine.TestCase
