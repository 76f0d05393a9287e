"""Publisher and subscriber over real sockets."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import zmq

from kvstrata.config.schema import EventsConfig
from kvstrata.errors import ClosedError, ConfigError
from kvstrata.telemetry import event_publisher
from kvstrata.telemetry.event_publisher import END_OF_REPLAY, EventPublisher, endpoint_of_rank
from kvstrata.telemetry.event_subscriber import EventSubscriber
from kvstrata.telemetry.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
)
from kvstrata.telemetry.opening import open_publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOPBACK = "tcp://127.0.0.1:*"


def a_config(**settings: object) -> EventsConfig:
    defaults: dict[str, object] = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, "topic": "kv"}
    return EventsConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def stored(number: int) -> BlockStored:
    return BlockStored(
        block_hashes=(number.to_bytes(32, "big"),),
        parent_block_hash=None,
        token_ids=(1, 2),
        block_size=2,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
        ownership="host",
    )


def follow(publisher: EventPublisher) -> EventSubscriber:
    # What is published before the subscription has reached the publisher is found by asking.
    replay = publisher.replay_endpoint
    return EventSubscriber(publisher.endpoint, replay_endpoint=replay, topic="kv", quiet_s=0.2)


def follow_relay(publisher: EventPublisher, endpoint: str) -> EventSubscriber:
    # It asks only when it notices a gap.
    replay = publisher.replay_endpoint
    return EventSubscriber(endpoint, replay_endpoint=replay, topic="kv", quiet_s=3600)


def until(subscriber: EventSubscriber, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen in time"
        subscriber.poll(0.05)


def numbers(subscriber: EventSubscriber) -> set[int]:
    index = subscriber.consumer.index
    return {int.from_bytes(a.block_hash, "big") for a in index if isinstance(a.block_hash, bytes)}


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with closing(EventPublisher(a_config())) as opened:
        yield opened


def test_a_subscriber_follows_from_the_start(publisher: EventPublisher) -> None:
    with closing(follow(publisher)) as subscriber:
        until(subscriber, lambda: subscriber.consumer.is_exact)
        for number in range(20):
            publisher.publish([stored(number)])
        until(subscriber, lambda: subscriber.consumer.next_number == 20)

        assert subscriber.consumer.is_exact
        assert numbers(subscriber) == set(range(20))
        assert set(subscriber.consumer.index.values()) == {1}


def test_a_late_subscriber_reads_the_replay(publisher: EventPublisher) -> None:
    for number in range(5):
        publisher.publish([stored(number)])
    with closing(follow(publisher)) as subscriber:
        until(subscriber, lambda: subscriber.consumer.next_number == 5)

        assert subscriber.consumer.is_exact
        assert numbers(subscriber) == set(range(5))


def test_a_gap_is_filled_by_the_replay(publisher: EventPublisher) -> None:
    with (
        lossy_relay(publisher, lost={1, 2}) as (endpoint, pump),
        closing(follow_relay(publisher, endpoint)) as subscriber,
    ):
        until(subscriber, lambda: subscriber.consumer.is_exact)
        publisher.publish([stored(0)])
        pump(1)
        until(subscriber, lambda: subscriber.consumer.next_number == 1)
        for number in (1, 2, 3):
            publisher.publish([stored(number)])
        pump(3)
        until(subscriber, lambda: subscriber.consumer.next_number == 4)

        assert subscriber.consumer.is_exact
        assert numbers(subscriber) == {0, 1, 2, 3}


def test_a_gap_beyond_the_replay_is_admitted_until_everything_is_cleared() -> None:
    with (
        closing(EventPublisher(a_config(replay_batches=1))) as publisher,
        lossy_relay(publisher, lost={1, 2}) as (endpoint, pump),
        closing(follow_relay(publisher, endpoint)) as subscriber,
    ):
        until(subscriber, lambda: subscriber.consumer.is_exact)
        for number in range(4):
            publisher.publish([stored(number)])
        pump(4)
        until(subscriber, lambda: subscriber.consumer.next_number == 4)
        assert not subscriber.consumer.is_exact
        publisher.publish([AllBlocksCleared(), stored(9)])
        pump(1)
        until(subscriber, lambda: subscriber.consumer.is_exact)

        assert numbers(subscriber) == {9}


def test_publishing_never_waits_and_a_drop_shows_as_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    is_busy, may_go_on = threading.Event(), threading.Event()

    def slowly(batch: KVEventBatch) -> bytes:
        is_busy.set()
        assert may_go_on.wait(10)
        return encode_batch(batch)

    monkeypatch.setattr(event_publisher, "encode_batch", slowly)
    with (
        closing(EventPublisher(a_config(queue_batches=1))) as publisher,
        closing(follow(publisher)) as subscriber,
    ):
        until(subscriber, lambda: subscriber.consumer.is_exact)
        publisher.publish([stored(0)])
        assert is_busy.wait(10)
        publisher.publish([stored(1)])
        publisher.publish([stored(2)])
        assert publisher.num_dropped == 1
        may_go_on.set()
        until(subscriber, lambda: subscriber.consumer.next_number == 4)

        assert not subscriber.consumer.is_exact
        assert numbers(subscriber) == {0, 1}


def test_a_publisher_started_again_is_noticed() -> None:
    first = EventPublisher(a_config(endpoint="tcp://*:0", replay_endpoint="tcp://*:0"))
    ports = [(at or "").rpartition(":")[2] for at in (first.endpoint, first.replay_endpoint)]
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    with closing(EventSubscriber(live, replay_endpoint=replay, quiet_s=0.2)) as subscriber:
        first.publish([stored(0)])
        until(subscriber, lambda: subscriber.consumer.is_exact and numbers(subscriber) == {0})
        first.close()
        until(subscriber, lambda: not subscriber.consumer.is_exact)
        again = [f"tcp://*:{port}" for port in ports]
        config = a_config(endpoint=again[0], replay_endpoint=again[1])
        with closing(EventPublisher(config)) as second:
            second.publish([stored(7)])
            until(subscriber, lambda: subscriber.consumer.is_exact and numbers(subscriber) == {7})


def test_a_long_replay_arrives_whole() -> None:
    count = 3000  # more than a socket holds unless told to
    with closing(EventPublisher(a_config())) as publisher:
        for number in range(count):
            publisher.publish([stored(number)])
        with closing(follow(publisher)) as subscriber:
            until(subscriber, lambda: subscriber.consumer.next_number == count)
            assert subscriber.consumer.is_exact


def test_replay_requests_are_answered_as_vllm_does(publisher: EventPublisher) -> None:
    publisher.publish([stored(0)])
    publisher.publish([])
    publisher.publish([stored(1)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(publisher.replay_endpoint or "")
        asking.send_multipart((b"", b"junk"))
        asking.send_multipart((b"", (1).to_bytes(8, "big")))
        while True:  # asked again until the batch has been sent
            frames = asking.recv_multipart()
            if frames[2] != END_OF_REPLAY:
                break
            asking.send_multipart((b"", (1).to_bytes(8, "big")))
        end = asking.recv_multipart()

    empty, topic, number, payload = frames
    assert (empty, topic, number) == (b"", b"kv", (1).to_bytes(8, "big"))
    assert decode_batch(payload).events == (stored(1),)
    assert decode_batch(payload).data_parallel_rank == 0
    assert end == [b"", b"", b"\xff" * 8, b""]


def test_close_sends_what_waits_and_ends_the_thread() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        publisher = EventPublisher(a_config())
        live.subscribe("kv")
        live.connect(publisher.endpoint)
        while not live.poll(10):  # subscribed only when the first one arrives
            publisher.publish([stored(0)])
        publisher.publish([AllBlocksCleared()])
        publisher.close()
        publisher.close()
        last = b""
        while live.poll(500):
            last = live.recv_multipart()[2]

    assert decode_batch(last).events == (AllBlocksCleared(),)
    assert "kvstrata-events" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        publisher.publish([stored(1)])


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://host:5557", 1, "tcp://host:5558"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("ipc:///tmp/events", 2, "ipc:///tmp/events_dp2"),
    ],
)
def test_every_rank_has_an_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


def test_an_address_in_use_is_a_wrong_setting(publisher: EventPublisher) -> None:
    taken = (publisher.replay_endpoint or "").replace("127.0.0.1", "*")
    with pytest.raises(ConfigError, match="cannot publish"):
        EventPublisher(a_config(endpoint=taken))
    with pytest.raises(ConfigError, match="null"):
        EventPublisher(EventsConfig())


def test_a_publisher_is_opened_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_publisher(EventsConfig()) is None
    opened = open_publisher(a_config())
    assert opened is not None
    opened.close()
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvstrata.telemetry.event_publisher")
    with pytest.raises(ConfigError, match="kvstrata\\[events\\]"):
        open_publisher(a_config())


class lossy_relay:  # noqa: N801 - used as a function
    """Passes a publisher's batches on, but for some numbers."""

    def __init__(self, publisher: EventPublisher, lost: set[int]) -> None:
        self._lost = lost
        self._is_subscribed = False
        self._context = zmq.Context()
        self._in: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._out: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        self._in.subscribe("kv")
        connected = self._in.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._in.connect(publisher.endpoint)
        assert connected.poll(10_000)
        self._in.disable_monitor()
        connected.close()
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self._endpoint = f"tcp://127.0.0.1:{port}"

    def __enter__(self) -> tuple[str, Callable[[int], None]]:
        return self._endpoint, self._pump

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def _pump(self, count: int) -> None:
        if not self._is_subscribed:
            assert self._out.poll(10_000)
            self._is_subscribed = self._out.recv() == b"\x01kv"
        for _ in range(count):
            assert self._in.poll(10_000)
            frames = self._in.recv_multipart()
            if int.from_bytes(frames[1], "big") not in self._lost:
                self._out.send_multipart(frames)
