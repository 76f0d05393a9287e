"""Follows one publisher's events over ZeroMQ, kvstrata's or vLLM's.

Ownership: everything belongs to the thread that polls.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstrata.telemetry.event_consumer import EventConsumer, NumberedBatch
from kvstrata.telemetry.event_publisher import END_OF_REPLAY, NUMBER_BYTES

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

_HIGH_WATER: Final = 100_000
"""Batches that wait for us before we miss some."""
_MS: Final = 1000


class EventSubscriber:
    """Keeps an index of what a publisher holds.

    Args:
        endpoint: the publisher's PUB socket.
        replay_endpoint: its ROUTER socket; None: gaps stay gaps.
        topic: what to subscribe to; every topic that starts so is read.
        replay_s: how long to wait for a replay.
        quiet_s: after so long without a batch, ask whether the last ones were lost.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_s: float = 2.0,
        quiet_s: float = 5.0,
    ) -> None:
        self._endpoint = endpoint
        self._topic = topic
        self._replay_endpoint = replay_endpoint
        self._replay_s = replay_s
        self._quiet_s = quiet_s
        self._heard_at = time.monotonic()
        self.consumer = EventConsumer(self._replay if replay_endpoint else None)
        self._context = zmq.Context()
        self._open()

    def poll(self, timeout_s: float) -> int:
        """Wait for batches and apply all that are there; how many came.

        Asks for a replay when batches are missing, when a connection begins, and after a quiet
        time.
        """
        poller = zmq.Poller()
        poller.register(self._live, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(int(timeout_s * _MS))
        self._is_lost()
        count = self._receive_all()
        if count:
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at >= self._quiet_s:
            self.catch_up()
            self._heard_at = time.monotonic()
        return count

    def catch_up(self) -> None:
        """Ask for what did not arrive."""
        self.consumer.catch_up()

    def close(self) -> None:
        """Close the sockets. Does nothing on successive calls."""
        if not self._live.closed:
            self._close_live()
            self._context.destroy(linger=0)

    def _open(self) -> None:
        self._live: Socket = self._context.socket(zmq.SUB)
        self._live.set_hwm(_HIGH_WATER)
        self._monitor: Socket = self._live.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._live.subscribe(self._topic)
        self._live.connect(self._endpoint)

    def _close_live(self) -> None:
        self._live.disable_monitor()
        self._monitor.close(linger=0)
        self._live.close(linger=0)

    def _receive_all(self) -> int:
        count = 0
        while self._live.poll(0):
            batch = _numbered(self._live.recv_multipart())
            # Looked at again before a batch is applied: it may be of a later connection.
            if not self._is_lost() and batch is not None:
                self.consumer.receive(batch)
                count += 1
        return count

    def _is_lost(self) -> bool:
        """See what happened to the connection; whether it was lost, and a new one begun.

        The new one has a socket of its own: what is left of the old stream must not be taken for
        the new one's.
        """
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self.consumer.suspect()
                self._close_live()
                self._open()
                return True
            self.catch_up()
        return False

    def _replay(self, number: int) -> list[NumberedBatch] | None:
        assert self._replay_endpoint is not None
        # A socket of its own each time: the rest of an answer that came late reaches nobody.
        asking: Socket = self._context.socket(zmq.DEALER)
        try:
            asking.set_hwm(0)
            asking.connect(self._replay_endpoint)
            asking.send_multipart((b"", number.to_bytes(NUMBER_BYTES, "big")))
            return _receive_replay(asking, time.monotonic() + self._replay_s)
        finally:
            asking.close(linger=0)


def _receive_replay(asking: Socket, deadline: float) -> list[NumberedBatch] | None:
    batches: list[NumberedBatch] = []
    while asking.poll(max(0, int((deadline - time.monotonic()) * _MS))):
        frames = asking.recv_multipart()
        if frames[-2:-1] == [END_OF_REPLAY]:
            return batches
        if (batch := _numbered(frames)) is not None:
            batches.append(batch)
    return None


def _numbered(frames: list[bytes]) -> NumberedBatch | None:
    """A batch from the last two frames of a message; None: it is none."""
    if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:  # noqa: PLR2004 - number and payload
        return None
    return NumberedBatch(int.from_bytes(frames[-2], "big"), frames[-1])
