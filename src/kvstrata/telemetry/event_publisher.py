"""KV events over ZeroMQ, as vLLM publishes them.

A PUB socket sends `(topic, number, payload)`; the number has 8 bytes, big-endian. A ROUTER socket
answers replay requests: asked with the first number wanted, it sends `(topic, number, payload)` for
every batch since then that it still has, and a last message whose number is -1.

Ownership: the outbox's two ends belong to the caller's thread and to the publisher's; sockets and
replay buffer to the publisher's thread from its start on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from kvstrata.errors import ClosedError, ConfigError
from kvstrata.telemetry.kv_events import encode_batch
from kvstrata.telemetry.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.config.schema import EventsConfig
    from kvstrata.telemetry.kv_events import KVEvent

    Socket = zmq.Socket[bytes]

_log = logging.getLogger(__name__)

NUMBER_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * NUMBER_BYTES
"""The number -1."""
_HIGH_WATER: Final = 100_000
"""Batches that wait for one slow reader before it misses some."""
_LINGER_MS: Final = 1000
_CLOSE_S: Final = 5.0
_REQUEST_FRAMES: Final = 3


class EventPublisher:
    """Publishes events to routers, on a thread of its own.

    Args:
        config: endpoints, topic and limits; wildcard endpoints are bound, others connected to.
        data_parallel_rank: whose events these are; moves the ports by as much.
        clock: seconds since the epoch.

    Raises:
        ConfigError: there is no endpoint, or it cannot be used.
    """

    def __init__(
        self,
        config: EventsConfig,
        data_parallel_rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = Outbox(config.queue_batches, data_parallel_rank, clock)
        self._sender = _Sender(config, data_parallel_rank, self._outbox)
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._sender.run, name="kvstrata-events", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where readers subscribe, with the port that was bound."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where readers ask for a replay, with the port that was bound."""
        return self._sender.replay_endpoint

    @property
    def num_dropped(self) -> int:
        """Batches that were never sent because too many waited; readers see a gap."""
        return self._outbox.num_dropped

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send events as one batch, soon. Never blocks. No events: no batch.

        Raises:
            ClosedError: after `close`.
        """
        if self._is_closed:
            raise ClosedError("the event publisher is closed")
        if events:
            self._outbox.put(events)
            self._sender.wake()

    def close(self) -> None:
        """Send what waits, then stop. Does nothing on successive calls."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sender.stop()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._sender.close()


class ReplayBuffer:
    """The last batches sent.

    Args:
        max_batches: how many are kept.
    """

    def __init__(self, max_batches: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=max_batches)

    def append(self, number: int, payload: bytes) -> None:
        """Keep a batch; the oldest makes room."""
        self._batches.append((number, payload))

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """The batches from `number` on that are still there."""
        return (batch for batch in self._batches if batch[0] >= number)


class _Sender:
    """The publisher's sockets, and the loop that serves them."""

    def __init__(self, config: EventsConfig, rank: int, outbox: Outbox) -> None:
        if config.endpoint is None:
            raise ConfigError("events.endpoint", "is null", "an address to publish at")
        self._topic = config.topic.encode()
        self._outbox = outbox
        self._buffer = ReplayBuffer(config.replay_batches)
        self._is_stopping = threading.Event()
        self._context = zmq.Context()
        self._replay: Socket | None = None
        try:
            self._open(config, config.endpoint, rank)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError("events", f"cannot publish: {error}", "free addresses") from error
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    def wake(self) -> None:
        """Let the loop look at the outbox. Never blocks."""
        with contextlib.suppress(BlockingIOError):  # full: the loop is awake already
            os.write(self._wake, b"\0")

    def stop(self) -> None:
        """Let the loop end when it has sent what waits."""
        self._is_stopping.set()
        self.wake()

    def close(self) -> None:
        """Close the pipe; the loop must have ended."""
        os.close(self._woken)
        os.close(self._wake)

    def run(self) -> None:
        """Send and answer until stopped; then close the sockets."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_stopping.is_set():
                poller.poll()
                self._drain_pipe()
                self._send_all()
                self._answer_replays()
            self._send_all()
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _open(self, config: EventsConfig, endpoint: str, rank: int) -> None:
        self._publish: Socket = self._context.socket(zmq.PUB)
        self._publish.set_hwm(_HIGH_WATER)
        self.endpoint = _attach(self._publish, endpoint_of_rank(endpoint, rank))
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            # A ROUTER silently drops what goes beyond this; a whole answer must fit.
            self._replay.set_hwm(config.replay_batches + 1)
            self.replay_endpoint = _attach(
                self._replay, endpoint_of_rank(config.replay_endpoint, rank)
            )

    def _drain_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass

    def _send_all(self) -> None:
        while (outgoing := self._outbox.take()) is not None:
            try:
                payload = encode_batch(outgoing.batch)
                number = outgoing.number.to_bytes(NUMBER_BYTES, "big")
                self._publish.send_multipart((self._topic, number, payload))
            except (zmq.ZMQError, msgspec.MsgspecError, TypeError, ValueError, OverflowError):
                _log.exception("a batch of KV events was lost")
                continue
            self._buffer.append(outgoing.number, payload)

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            request = self._replay.recv_multipart()
            if len(request) == _REQUEST_FRAMES and len(request[2]) == NUMBER_BYTES:
                self._answer(self._replay, request[0], int.from_bytes(request[2], "big"))

    def _answer(self, replay: Socket, client: bytes, first: int) -> None:
        try:
            for number, payload in self._buffer.since(first):
                frames = (self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
                replay.send_multipart((client, b"", *frames), zmq.DONTWAIT)
            replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""), zmq.DONTWAIT)
        except zmq.ZMQError:
            _log.warning("a replay of KV events was cut off", exc_info=True)


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one data-parallel rank: the port moves with it, or the name gets a suffix."""
    base, _, port = endpoint.rpartition(":")
    if rank == 0 or (endpoint.startswith("tcp://") and port in {"*", "0"}):
        return endpoint
    if endpoint.startswith("tcp://"):
        return f"{base}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def _attach(socket: Socket, endpoint: str) -> str:
    """Bind a wildcard or a local name, connect to anything else; the endpoint with its port."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    is_bound = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    if not is_bound and socket.socket_type == zmq.PUB:
        socket.connect(endpoint)
        return endpoint
    socket.bind(endpoint)
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
