from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ChunkCorrupt
from kvstrata.testing.chunks import a_label, a_namespace, empty, filled, within
from kvstrata.testing.faults import DAMAGES

from .support import RawBucket, RawDirectory, RawValkey, a_generator, directory_store, rounds

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.interfaces import ChunkStore
    from kvstrata.testing.faults import Tally
    from kvstrata.testing.servers import ServerProcess

    from .support import RawMedium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OURS, THEIRS = a_namespace(), a_namespace("other weights")
CHUNKS_PER_ROUND = 25
SIZES = (1, 500, 4096, 9_000, 9_000, 20_001)
OTHER_KINDS = ("swapped", "of another namespace", "vanished")


class Corruption:
    """Writes chunks, damages most of them, and looks at what is still served."""

    def __init__(self, medium: RawMedium, rng: random.Random, tally: Tally) -> None:
        self._medium = medium
        self._rng = rng
        self._tally = tally
        self._store = medium.open(OURS)
        self._foreign = medium.open(THEIRS)
        self._numbers = itertools.count()

    def run(self, num_faults: int) -> None:
        while self._tally.num_faults < num_faults:
            self._round()
        self._store.close()
        self._foreign.close()

    def _round(self) -> None:
        sizes = self._rng.choices(SIZES, k=CHUNKS_PER_ROUND)
        labels = [a_label(next(self._numbers), payload_bytes=size) for size in sizes]
        keys = {label.key for label in labels}
        assert self._store.write([filled(label) for label in labels], within(30)).done == keys
        self._foreign.write([filled(label, seed=1) for label in labels], within(30))
        hurt, vanished = self._harm(labels)

        outcome = self._read(labels)
        assert outcome.done == keys - hurt - vanished, "what is whole is served, nothing else"
        assert outcome.failed.keys() == hurt
        assert outcome.absent == vanished
        assert all(isinstance(error, ChunkCorrupt) for error in outcome.failed.values())
        self._mend(labels, hurt | vanished)

    def _read(self, labels: Sequence[ChunkLabel]) -> TierOutcome:
        buffers = [empty(label) for label in labels]
        outcome = self._store.read(buffers, within(30))
        self._tally.verify(buffers, outcome)
        return outcome

    def _mend(self, labels: Sequence[ChunkLabel], gone: set[ChunkKey]) -> None:
        """What was damaged can be written again, and is whole then."""
        lost = [label for label in labels if label.key in gone]
        for label in lost:
            if self._rng.random() < 0.5:
                self._store.remove([label.key], within(30))
        self._store.write([filled(label) for label in lost], within(30))
        assert self._read(lost).done == gone
        for store in (self._store, self._foreign):
            store.remove([label.key for label in labels], within(30))

    def _harm(self, labels: Sequence[ChunkLabel]) -> tuple[set[ChunkKey], set[ChunkKey]]:
        hurt: set[ChunkKey] = set()
        vanished: set[ChunkKey] = set()
        left = self._rng.sample(labels, k=int(0.8 * len(labels)))
        while len(left) >= 2:
            kind = self._rng.choice([*DAMAGES, *OTHER_KINDS])
            keys = [left.pop().key for _ in range(2 if kind == "swapped" else 1)]
            self._inflict(kind, keys)
            self._tally.inject(kind, len(keys))
            (vanished if kind == "vanished" else hurt).update(keys)
        return hurt, vanished

    def _inflict(self, kind: str, keys: Sequence[ChunkKey]) -> None:
        get, put = self._medium.get, self._medium.put
        if kind in DAMAGES:
            put(OURS, keys[0], DAMAGES[kind](get(OURS, keys[0]), self._rng))
        elif kind == "of another namespace":
            put(OURS, keys[0], get(THEIRS, keys[0]))
        elif kind == "vanished":
            put(OURS, keys[0], None)
        else:
            first, second = get(OURS, keys[0]), get(OURS, keys[1])
            put(OURS, keys[0], second)
            put(OURS, keys[1], first)


def test_damaged_files_are_never_served(tmp_path: Path, tally: Tally) -> None:
    medium = RawDirectory(tmp_path / "store")
    Corruption(medium, a_generator("files"), tally).run(rounds(short=400, full=7_000))
    tally.check()


def test_damaged_values_are_never_served(redis: ServerProcess, tally: Tally) -> None:
    medium = RawValkey(redis)
    Corruption(medium, a_generator("values"), tally).run(rounds(short=200, full=3_000))
    medium.close()
    tally.check()


def test_damaged_objects_are_never_served(s3: ServerProcess, tally: Tally) -> None:
    medium = RawBucket(s3)
    Corruption(medium, a_generator("objects"), tally).run(rounds(short=40, full=800))
    tally.check()


def test_bytes_that_change_during_a_read_are_never_served(tmp_path: Path, tally: Tally) -> None:
    store, medium = directory_store(tmp_path / "store"), RawDirectory(tmp_path / "store")
    labels = [a_label(number, payload_bytes=200_000) for number in range(4)]
    rng, is_over = a_generator("changing"), threading.Event()
    num_flips = rounds(short=100, full=1_500)

    def flip() -> None:
        while tally.faults["bit flipped during reads"] < num_flips:
            time.sleep(rng.uniform(0, 0.01))  # at any moment of a read or a write
            path = medium.path(OURS, rng.choice(labels).key)
            with contextlib.suppress(FileNotFoundError), _opened(path) as fd:
                _flip_bit(fd, rng)
                tally.inject("bit flipped during reads")
        is_over.set()

    with _running(flip):
        while not is_over.is_set():
            store.write([filled(label) for label in labels], within(10))
            _read_verified(store, labels, tally)
    store.close()
    tally.check()


def _read_verified(store: ChunkStore, labels: Sequence[ChunkLabel], tally: Tally) -> None:
    buffers = [empty(label) for label in labels]
    tally.verify(buffers, store.read(buffers, within(10)))


def _flip_bit(fd: int, rng: random.Random) -> None:
    offset = rng.randrange(os.fstat(fd).st_size)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ (1 << rng.randrange(8))]), offset)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _running(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
