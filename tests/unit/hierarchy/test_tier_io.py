from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import Rank
from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierTimeout, TierUnavailable
from kvstrata.hierarchy.task_queue import Verb
from kvstrata.hierarchy.tier_io import IOReport, TierIO
from kvstrata.testing.chunks import a_label, content, empty, filled, within
from kvstrata.testing.memory_store import MemoryStore
from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers.wrapping import DelayedStore, FailingStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LABELS = [a_label(n, payload_bytes=5000) for n in range(6)]
KEYS = [label.key for label in LABELS]


def reports_of(io: TierIO, count: int = 1, seconds: float = 10) -> list[IOReport]:
    reports: list[IOReport] = []
    end = time.monotonic() + seconds
    while len(reports) < count:
        assert time.monotonic() < end, "waited in vain"
        reports.extend(io.take_reports())
        time.sleep(0.001)
    return reports


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(Rank())


@pytest.fixture
def make_io() -> Iterator[Callable[..., TierIO]]:
    made: list[TierIO] = []

    def make(store: object, **settings: int) -> TierIO:
        made.append(TierIO("tier", store, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for io in made:
        io.close()


def test_a_batch_is_written_and_read_by_several_threads(
    store: MemoryStore, make_io: Callable[..., TierIO]
) -> None:
    io = make_io(store, num_threads=3)
    io.move(1, Verb.WRITE, [filled(label) for label in LABELS], within(10))
    (written,) = reports_of(io)
    buffers = [empty(label) for label in LABELS]
    io.move(2, Verb.READ, buffers, within(10))
    (read,) = reports_of(io)

    assert written.outcome.done == read.outcome.done == set(KEYS)
    assert [content(b) for b in buffers] == [content(filled(label)) for label in LABELS]
    assert not read.held
    assert io.num_pending == 0


def test_find_is_one_question(store: MemoryStore, make_io: Callable[..., TierIO]) -> None:
    io = make_io(store)
    store.write([filled(LABELS[0])], within(10))
    io.find(1, KEYS, within(10))
    (report,) = reports_of(io)

    assert report.outcome.done == {KEYS[0]}
    assert report.outcome.absent == set(KEYS[1:])


def test_an_empty_job_is_reported_too(store: MemoryStore, make_io: Callable[..., TierIO]) -> None:
    io = make_io(store)
    io.move(1, Verb.READ, [], within(10))
    (report,) = reports_of(io)

    assert not report.outcome.done
    assert io.num_pending == 0


def test_a_hung_read_is_reported_at_its_deadline_and_released_later(
    store: MemoryStore, make_io: Callable[..., TierIO]
) -> None:
    io = make_io(DelayedStore(store, 2.0), num_threads=1)
    start = time.monotonic()
    io.move(1, Verb.READ, [empty(LABELS[0])], within(0.2))
    (late,) = reports_of(io)

    assert 0.2 <= time.monotonic() - start < 1.5
    assert isinstance(late.outcome.failed[KEYS[0]], TierTimeout)
    assert late.held == {KEYS[0]}
    (released,) = reports_of(io)
    assert time.monotonic() - start >= 2.0
    assert released.released == {KEYS[0]}
    assert not released.outcome.done
    assert io.num_pending == 0


def test_what_has_not_begun_by_the_deadline_is_never_begun(
    store: MemoryStore, make_io: Callable[..., TierIO]
) -> None:
    io = make_io(DelayedStore(store, 0.3), num_threads=2)
    io.move(1, Verb.WRITE, [filled(label) for label in LABELS], within(0.1))
    (late,) = reports_of(io)
    assert set(late.outcome.failed) == set(KEYS)
    assert late.held == {KEYS[0]}, "only what the medium has in its hands"
    assert late.hurried == set(KEYS), "and the tier is not to blame"
    (released,) = reports_of(io)

    assert released.released == late.held
    time.sleep(0.5)
    assert len(store.shelf) <= 1
    assert io.num_pending == 0


def test_a_read_does_not_wait_behind_writes_under_way(
    store: MemoryStore, make_io: Callable[..., TierIO]
) -> None:
    class SlowWrites(WrappedStore):
        def write(self, *arguments: object) -> object:  # type: ignore[override]
            time.sleep(3.0)
            return super().write(*arguments)  # type: ignore[arg-type]

    store.write([filled(LABELS[0])], within(10))
    io = make_io(SlowWrites(store), num_threads=2)
    io.move(1, Verb.WRITE, [filled(label) for label in LABELS[1:3]], within(10))
    time.sleep(0.05)
    start = time.monotonic()
    io.move(2, Verb.READ, [empty(LABELS[0])], within(10))
    (report,) = reports_of(io)

    assert report.job_id == 2
    assert report.outcome.done == {KEYS[0]}
    assert time.monotonic() - start < 2.5


@pytest.mark.parametrize("answer", [TierOutcome(), None, TierOutcome(frozenset({KEYS[5]}))])
def test_an_answer_that_leaves_keys_out_is_a_fault(
    store: MemoryStore, make_io: Callable[..., TierIO], answer: object
) -> None:
    class Vague(WrappedStore):
        def read(self, *_: object) -> object:  # type: ignore[override]
            return answer

    io = make_io(Vague(store))
    io.move(1, Verb.READ, [empty(LABELS[0])], within(10))
    (report,) = reports_of(io)

    assert set(report.outcome.failed) == {KEYS[0]}
    assert not report.outcome.done


def test_reads_overtake_writes(make_io: Callable[..., TierIO]) -> None:
    gate, order = threading.Event(), list[str]()

    class Gated(WrappedStore):
        def write(self, *arguments: object) -> object:  # type: ignore[override]
            gate.wait(5)
            order.append("write")
            return super().write(*arguments)  # type: ignore[arg-type]

        def read(self, *arguments: object) -> object:  # type: ignore[override]
            order.append("read")
            return super().read(*arguments)  # type: ignore[arg-type]

    io = make_io(Gated(MemoryStore(Rank())), num_threads=1)
    io.move(1, Verb.WRITE, [filled(label) for label in LABELS[:3]], within(10))
    io.move(2, Verb.READ, [empty(LABELS[0])], within(10))
    gate.set()
    reports_of(io, count=2)

    assert order.index("read") <= 1, "only the write that had begun came first"


def test_a_stores_bug_is_a_fault_and_the_thread_goes_on(
    store: MemoryStore, make_io: Callable[..., TierIO], caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(WrappedStore):
        def read(self, *_: object) -> object:  # type: ignore[override]
            raise RuntimeError("a bug")

    io = make_io(Buggy(store), num_threads=1)
    io.move(1, Verb.READ, [empty(LABELS[0])], within(10))
    (report,) = reports_of(io)
    io.move(2, Verb.WRITE, [filled(LABELS[0])], within(10))
    (after,) = reports_of(io)

    assert isinstance(report.outcome.failed[KEYS[0]], TierUnavailable)
    assert after.outcome.done == {KEYS[0]}
    assert "unexpected error" in caplog.text


def test_faults_concern_their_keys_alone(
    store: MemoryStore, make_io: Callable[..., TierIO]
) -> None:
    io = make_io(FailingStore(store, lambda key: key == KEYS[2]))
    io.move(1, Verb.WRITE, [filled(label) for label in LABELS], within(10))
    (report,) = reports_of(io)

    assert set(report.outcome.failed) == {KEYS[2]}
    assert report.outcome.done == set(KEYS) - {KEYS[2]}


class Shelves:
    """Stores over one shelf per namespace."""

    def __init__(self) -> None:
        self.shelves: dict[str, dict[object, bytes]] = {}

    def open(self, namespace: object, rank: Rank) -> MemoryStore:
        shelf = self.shelves.setdefault(repr(namespace), {})
        return MemoryStore(rank, shelf)  # type: ignore[arg-type]


class TestMemoryStore(TierContract):
    """The contract as far as a store without headers can keep it."""

    @pytest.fixture
    def medium(self) -> Shelves:
        return Shelves()

    test_damage_is_never_served = None  # type: ignore[assignment]
    test_a_chunk_in_anothers_place_is_not_served = None  # type: ignore[assignment]
    test_a_label_that_differs_is_not_served = None  # type: ignore[assignment]
    test_damage_can_be_written_over = None  # type: ignore[assignment]
