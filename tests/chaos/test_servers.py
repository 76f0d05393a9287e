from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import TierFull, TierTimeout, TierUnavailable
from kvstrata.testing.chunks import a_label, empty, filled, within
from kvstrata.testing.servers import redis_server

from .support import a_generator, bucket_store, rounds, valkey_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.interfaces import ChunkStore
    from kvstrata.testing.faults import Tally
    from kvstrata.testing.servers import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CALLS = ("read", "write", "find", "remove")


def call(store: ChunkStore, verb: str, numbers: Sequence[int], given_s: float) -> TierOutcome:
    labels = [a_label(number) for number in numbers]
    if verb == "read":
        return store.read([empty(label) for label in labels], within(given_s))
    if verb == "write":
        return store.write([filled(label) for label in labels], within(given_s))
    keys = [label.key for label in labels]
    return (store.find if verb == "find" else store.remove)(keys, within(given_s))


def timed_call(
    store: ChunkStore, verb: str, numbers: Sequence[int], *, given_s: float, tally: Tally
) -> TierOutcome:
    start = time.monotonic()
    outcome = call(store, verb, numbers, given_s)
    tally.time(time.monotonic() - start, given_s)
    return outcome


def read_back(store: ChunkStore, numbers: Sequence[int], tally: Tally) -> TierOutcome:
    buffers = [empty(a_label(number)) for number in numbers]
    outcome = store.read(buffers, within(20))
    tally.verify(buffers, outcome)
    return outcome


def is_only(outcome: TierOutcome, kind: type[Exception]) -> bool:
    return not outcome.done and all(isinstance(e, kind) for e in outcome.failed.values())


def stop_again_and_again(
    store: ChunkStore, server: ServerProcess, tally: Tally, num_rounds: int
) -> None:
    """Halt a server for one call at a time; afterwards it answers, and to the right question."""
    rng, numbers = a_generator("stopped servers"), range(5)
    for _ in range(num_rounds):
        assert len(call(store, "write", numbers, 20).done) == len(numbers)
        server.pause()
        tally.inject("server stopped")
        given_s = rng.uniform(0.4, 0.7)
        outcome = timed_call(store, rng.choice(CALLS), numbers, given_s=given_s, tally=tally)
        server.resume()
        assert is_only(outcome, TierTimeout)
        assert len(outcome.failed) == len(numbers)
        read_back(store, numbers, tally)


def test_a_stopped_redis_costs_no_more_than_the_deadline(
    redis: ServerProcess, tally: Tally
) -> None:
    store = valkey_store(redis)
    stop_again_and_again(store, redis, tally, rounds(short=3, full=45))
    store.close()
    tally.check()


def test_a_stopped_s3_costs_no_more_than_the_deadline(s3: ServerProcess, tally: Tally) -> None:
    store = bucket_store(s3)
    stop_again_and_again(store, s3, tally, rounds(short=2, full=25))
    store.close()
    tally.check()


def test_a_redis_that_forgets_has_misses_and_not_faults(redis: ServerProcess, tally: Tally) -> None:
    store, numbers = valkey_store(redis), range(20)
    for verb in CALLS * rounds(short=1, full=8):
        assert len(call(store, "write", numbers, 20).done) == len(numbers)
        redis.kill()
        tally.inject("server killed")
        outcome = timed_call(store, verb, numbers, given_s=1, tally=tally)
        assert is_only(outcome, TierUnavailable)
        redis.start()
        assert len(read_back(store, numbers, tally).absent) == len(numbers)
    store.close()
    tally.check()


def test_a_redis_that_keeps_a_log_loses_nothing_when_killed(tmp_path: Path, tally: Tally) -> None:
    rng = a_generator("log")
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        store, acknowledged, number = valkey_store(server), list[int](), 0
        for _ in range(rounds(short=3, full=40)):
            killing = threading.Timer(rng.uniform(0.01, 0.2), server.kill)
            killing.start()
            fresh: list[int] = []
            while outcome := call(store, "write", [number], 5).done:
                fresh.append(number)
                number += len(outcome)
            number += 1
            killing.join()
            tally.inject("server killed")
            server.start()
            kept = read_back(store, fresh, tally).done
            tally.count_durable(len(fresh), num_lost=len(fresh) - len(kept))
            acknowledged += fresh
        assert len(read_back(store, acknowledged, tally).done) == len(acknowledged)
        store.close()
    tally.check()


def test_a_redis_out_of_memory_refuses_and_keeps_the_others(tmp_path: Path, tally: Tally) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    kept, rng = list[int](), a_generator("memory")
    with redis_server(tmp_path, *options) as server:
        store = valkey_store(server)
        for number in range(rounds(short=300, full=1_500)):
            outcome = call(store, "write", [number], 5)
            if outcome.done:
                kept.append(number)
                continue
            assert is_only(outcome, TierFull)
            tally.inject("out of memory")
            if rng.random() < 0.5:
                call(store, "remove", [kept.pop(rng.randrange(len(kept)))], 5)
        assert len(read_back(store, kept, tally).done) == len(kept)
        store.close()
    assert tally.num_faults > 50
    tally.check()


def test_an_s3_that_is_gone_and_back_is_used_again(s3: ServerProcess, tally: Tally) -> None:
    store, numbers = bucket_store(s3), range(10)
    for verb in CALLS[: rounds(short=1, full=4)] * rounds(short=1, full=3):
        assert len(call(store, "write", numbers, 20).done) == len(numbers)
        assert len(read_back(store, numbers, tally).done) == len(numbers)
        s3.kill()
        tally.inject("server killed")
        outcome = timed_call(store, verb, numbers, given_s=1, tally=tally)
        assert is_only(outcome, TierUnavailable | TierTimeout)  # type: ignore[arg-type]
        s3.start()
        assert len(read_back(store, numbers, tally).absent) == len(numbers), "it forgets"
    store.close()
    tally.check()


class Storm:
    """Several threads use one store without a pause, while its server is maltreated."""

    def __init__(self, store: ChunkStore, tally: Tally) -> None:
        self._store = store
        self._tally = tally
        self._is_over = threading.Event()
        self._errors: list[Exception] = []

    def run(self, harm: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._use, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        try:
            harm()
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        assert not self._errors

    def _use(self, index: int) -> None:
        try:
            self._use_until_over(index)
        except Exception as error:  # noqa: BLE001 - shown by the test's own thread
            self._errors.append(error)

    def _use_until_over(self, index: int) -> None:
        rng = a_generator(f"storm {index}")
        while not self._is_over.is_set():
            buffers = [empty(a_label(number)) for number in rng.sample(range(30), k=3)]
            chunks = [filled(a_label(number)) for number in rng.sample(range(30), k=3)]
            start = time.monotonic()
            outcome = self._store.read(buffers, within(1))
            self._tally.time(time.monotonic() - start, 1)
            self._tally.verify(buffers, outcome)
            start = time.monotonic()
            self._store.write(chunks, within(1))
            self._tally.time(time.monotonic() - start, 1)


def test_threads_never_get_each_others_chunks_from_a_redis_in_trouble(
    redis: ServerProcess, tally: Tally
) -> None:
    rng, store = a_generator("storm"), valkey_store(redis)

    def harm() -> None:
        for _ in range(rounds(short=4, full=50)):
            time.sleep(rng.uniform(0, 0.1))
            if rng.random() < 0.5:
                redis.pause()
                time.sleep(rng.uniform(0.1, 1.5))
                redis.resume()
                tally.inject("server stopped")
            else:
                redis.kill()
                time.sleep(rng.uniform(0, 0.1))
                redis.start()
                tally.inject("server killed")

    Storm(store, tally).run(harm)
    store.close()
    assert tally.num_verified > 100
    tally.check()
