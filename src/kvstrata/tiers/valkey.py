"""Chunks in a Valkey or Redis server, or a cluster of them: one value for each rank's part.

Every call is a list of requests, one for each chunk, sent in pipelines of bounded size. A pipeline
that fails drops its connection, so that no later call reads a reply meant for it.
"""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from redis.exceptions import (
    AskError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstrata.errors import ChunkCorrupt, ClosedError, TierFull, TierTimeout, TierUnavailable
from kvstrata.tiers.chunk_facts import Presence, outcome_of, shown
from kvstrata.tiers.chunk_format import BadChunk, key_name
from kvstrata.tiers.raw_chunk import fill, raw_bytes, raw_parts
from kvstrata.tiers.valkey_servers import MAX_CALLS, open_servers, secrets_of, time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from redis import Redis

    from kvstrata.config.schema import ValkeyTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline, TierOutcome
    from kvstrata.errors import TierError
    from kvstrata.tiers.chunk_facts import Fact
    from kvstrata.tiers.valkey_servers import Command, Reply

_PIPELINE_BYTES: Final = 32 * 2**20
_PIPELINE_COMMANDS: Final = 64
# The client's errors share no root; a passed deadline is an OSError.
_FAULTS: Final = (RedisError, RedisClusterException, OSError)
# Not a fault: the key is moving to another server.
_REDIRECTIONS: Final = (AskError, TryAgainError)


@dataclass(frozen=True, slots=True)
class _Request:
    """One command about one chunk, and how to understand the reply."""

    key: ChunkKey
    name: str
    num_bytes: int
    """Of the value that travels, in either direction."""
    command: Callable[[], Command]
    """Made when its pipeline is sent, so that only one pipeline's values are in memory."""
    presence: Callable[[Reply], Presence]
    """May raise BadChunk."""


class ValkeyStore:
    """A `ChunkStore` over a Valkey or Redis server, or a cluster of them.

    Connects at the first call. A faulty server is not asked again within a call, nor is anything
    tried twice: what to do about a fault is for the hierarchy to decide.

    Ownership: `_is_closed` is set once by any thread; the rest never changes.

    Raises:
        ConfigError: the address cannot be read.
    """

    def __init__(self, config: ValkeyTierConfig, namespace: Namespace, rank: Rank) -> None:
        self._name = config.name or "valkey"
        self._timeout_s = float(config.timeout)
        self._ttl_ms = None if config.ttl is None else max(1, round(config.ttl * 1000))
        self._namespace = namespace
        self._fingerprint = namespace.fingerprint
        self._rank = rank
        self._secrets = secrets_of(config)
        self._servers = open_servers(config)
        self._turns = threading.BoundedSemaphore(MAX_CALLS)
        self._is_closed = False

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Fill the buffers; a chunk is done only if size, checksum and header are right.

        Raises:
            ClosedError: after `close`.
        """
        return self._outcome([self._read_request(chunk) for chunk in chunks], deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Keep the buffers' payloads, for the configured life. Atomic for each chunk.

        Raises:
            ClosedError: after `close`.
        """
        return self._outcome([self._write_request(chunk) for chunk in chunks], deadline)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Which keys every rank has; verifies nothing and reads no payload.

        Raises:
            ClosedError: after `close`.
        """
        return self._outcome([self._find_request(key) for key in keys], deadline)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Drop this rank's part of the keys.

        Raises:
            ClosedError: after `close`.
        """
        return self._outcome([self._remove_request(key) for key in keys], deadline)

    def close(self) -> None:
        """Let go of the connections; calls under way end first. Does nothing a second time."""
        self._is_closed = True
        self._servers.disconnect()

    def _read_request(self, chunk: ChunkBuffer) -> _Request:
        name = self._value_name(chunk.label.key, self._rank.index)

        def presence(reply: Reply) -> Presence:
            if not isinstance(reply, bytes):
                return Presence.ABSENT
            fill(chunk, memoryview(reply), self._namespace, self._rank)
            return Presence.DONE

        return _Request(
            chunk.label.key, name, raw_bytes(chunk.label), lambda: ("GET", name), presence
        )

    def _write_request(self, chunk: ChunkBuffer) -> _Request:
        name = self._value_name(chunk.label.key, self._rank.index)
        life: Command = () if self._ttl_ms is None else ("PX", self._ttl_ms)

        def command() -> Command:
            return ("SET", name, b"".join(raw_parts(chunk, self._namespace, self._rank)), *life)

        return _Request(
            chunk.label.key, name, raw_bytes(chunk.label), command, lambda _: Presence.DONE
        )

    def _find_request(self, key: ChunkKey) -> _Request:
        names = [self._value_name(key, index) for index in range(self._rank.count)]
        return _Request(
            key, names[0], 0, lambda: ("EXISTS", *names), lambda n: Presence.of(n == len(names))
        )

    def _remove_request(self, key: ChunkKey) -> _Request:
        name = self._value_name(key, self._rank.index)
        return _Request(key, name, 0, lambda: ("UNLINK", name), lambda n: Presence.of(n == 1))

    def _value_name(self, key: ChunkKey, rank_index: int) -> str:
        # A cluster places by what stands in the braces: the ranks' parts of one chunk lie
        # together, so that one command finds them all, and chunks spread over the servers.
        return f"kvstrata:{self._fingerprint}:{{{key_name(key)}}}:{rank_index}of{self._rank.count}"

    def _outcome(self, requests: Sequence[_Request], deadline: Deadline) -> TierOutcome:
        if self._is_closed:
            raise ClosedError(f"tier {self._name} is closed")
        facts: list[tuple[ChunkKey, Fact]] = []
        try:
            with self._turn(deadline), time_limit(deadline, self._timeout_s):
                for share in self._servers.route([request.name for request in requests]):
                    mine = [requests[position] for position in share.positions]
                    facts += self._asked(share.server, mine, deadline)
        except _FAULTS as error:
            facts = self._all_failed(requests, error, deadline)
        return outcome_of(facts)

    @contextlib.contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        """Wait until few enough calls are under way for the connections there may be."""
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not self._turns.acquire(timeout=left_s):
            raise TimeoutError("the deadline passed before the call could start")
        try:
            yield
        finally:
            self._turns.release()
            if self._is_closed:
                self._servers.disconnect()

    def _asked(
        self, server: Redis, requests: Sequence[_Request], deadline: Deadline
    ) -> list[tuple[ChunkKey, Fact]]:
        """Ask one server, up to its first fault."""
        facts: list[tuple[ChunkKey, Fact]] = []
        try:
            for batch in _batches(requests):
                replies = _piped(server, [request.command() for request in batch])
                for request, reply in zip(batch, replies, strict=True):
                    facts.append((request.key, self._fact(request, reply, deadline)))
        except _FAULTS as error:
            facts += self._all_failed(requests[len(facts) :], error, deadline)
        return facts

    def _all_failed(
        self, requests: Sequence[_Request], error: Exception, deadline: Deadline
    ) -> list[tuple[ChunkKey, Fact]]:
        self._servers.suspect()
        keys = [request.key for request in requests]
        fault = self._fault(error, deadline, keys)
        return [(key, fault) for key in keys]

    def _fact(self, request: _Request, reply: Reply, deadline: Deadline) -> Fact:
        try:
            if isinstance(reply, _REDIRECTIONS):
                reply = self._servers.follow(request.command())
            if isinstance(reply, Exception):
                return self._fault(reply, deadline, [request.key])
            return request.presence(reply)
        except BadChunk as error:
            return ChunkCorrupt(self._name, str(error), [request.key])
        except ResponseError as error:
            return self._fault(error, deadline, [request.key])

    def _fault(self, error: Exception, deadline: Deadline, keys: Sequence[ChunkKey]) -> TierError:
        text = shown(error, self._secrets)
        if isinstance(error, OutOfMemoryError):
            return TierFull(self._name, text, keys)
        # A cluster client wraps its servers' timeouts, so the clock decides as well.
        is_late = isinstance(error, RedisTimeoutError | TimeoutError)
        if is_late or time.monotonic() >= deadline:
            return TierTimeout(self._name, text, keys)
        return TierUnavailable(self._name, text, keys)


def _piped(server: Redis, commands: Sequence[Command]) -> list[Reply]:
    """The replies to some commands sent at once; a refused one has its error as reply."""
    with server.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))


def _batches(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Cut requests into pipelines; a value larger than a pipeline travels alone."""
    batch: list[_Request] = []
    num_bytes = 0
    for request in requests:
        is_full = len(batch) == _PIPELINE_COMMANDS
        if batch and (is_full or num_bytes + request.num_bytes > _PIPELINE_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(request)
        num_bytes += request.num_bytes
    if batch:
        yield batch
