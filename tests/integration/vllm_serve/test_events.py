"""vLLM's own publisher carries our events, and a reader's index follows what we hold."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.telemetry.event_subscriber import EventSubscriber
from kvstrata.testing.vllm_server import VllmServer, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstrata.testing.vllm_exam import Exam

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS = {0, 1, 2, 3}
FULL = 3
"""The group of full attention, which keeps every block."""
NUM_BLOCKS = 11
"""Whole blocks of a prompt."""


class Reader:
    """A router's view: what it believes that a server holds."""

    def __init__(self, folder: Path) -> None:
        # vLLM binds TCP endpoints to every interface, or not at all.
        self.live, self.replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        self.subscriber = EventSubscriber(self.live, replay_endpoint=self.replay, quiet_s=0.5)

    @property
    def options(self) -> tuple[str, ...]:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.live,
            "replay_endpoint": self.replay,
        }
        return "--kv-events-config", json.dumps(config)

    def believes(self) -> Counter[tuple[str | None, int | None]]:
        """How many blocks there are, by medium and group."""
        index = self.subscriber.consumer.index
        return Counter((address.medium, address.group_idx) for address in index)

    def groups(self, medium: str) -> set[int | None]:
        return {group for found, group in self.believes() if found == medium}

    def follow(self, is_true: Callable[[], bool], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not is_true():
            assert time.monotonic() < end, dict(self.believes())
            self.subscriber.poll(0.1)

    def follow_to_the_end(self, quiet_s: float = 2.0) -> None:
        """Until nothing more comes."""
        end = time.monotonic() + quiet_s
        while time.monotonic() < end:
            if self.subscriber.poll(0.1):
                end = time.monotonic() + quiet_s


@pytest.fixture
def reader() -> Iterator[Reader]:
    # Names of sockets have to be short.
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder))
        yield reader
        reader.subscriber.close()


@pytest.fixture
def published(
    make_server: Callable[..., VllmServer], reader: Reader, disk: dict[str, Any]
) -> Iterator[VllmServer]:
    events = {"self_describing": True}
    server = make_server("published", disk, options=reader.options, events=events)
    with running(server):
        yield server


def test_a_reader_follows_every_group_in_every_tier(
    published: VllmServer, reader: Reader, exam: Exam
) -> None:
    exam.take(published, 0)
    published.settle()
    reader.follow(lambda: reader.believes()["STORAGE", FULL] == NUM_BLOCKS)
    assert reader.groups("CPU") == reader.groups("STORAGE") == reader.groups("GPU") == GROUPS
    assert reader.believes()["CPU", FULL] == NUM_BLOCKS

    assert published.has_reset(including="external")
    exam.take(published, 1)  # vLLM publishes with steps
    published.settle()
    reader.follow_to_the_end()

    believed = reader.believes()
    assert exam.take(published, 0) == [0], "what was reset is found again"
    assert [believed[medium, FULL] for medium in ("GPU", "CPU", "STORAGE")] == [NUM_BLOCKS] * 3
    assert reader.subscriber.consumer.is_exact


def test_chunks_below_survive_a_reset_of_the_device(
    published: VllmServer, reader: Reader, exam: Exam
) -> None:
    exam.take(published, 0)
    published.settle()
    reader.follow(lambda: reader.believes()["STORAGE", FULL] == NUM_BLOCKS)

    assert published.has_reset()
    assert exam.take(published, 1) == [0]  # vLLM publishes with steps
    published.settle()
    reader.follow_to_the_end()

    believed = reader.believes()
    assert exam.take(published, 0) > [0], "it is still there"
    assert [believed[medium, FULL] for medium in ("CPU", "STORAGE")] == [2 * NUM_BLOCKS] * 2
