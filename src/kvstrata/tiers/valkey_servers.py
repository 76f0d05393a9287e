"""Connections to Valkey or Redis that keep a call's deadline, and which server keeps which key.

redis-py knows one timeout per connection and applies it to every socket operation anew, so a
slow server, a retry or a topology refresh can add up to any time. Here every single wait on a
socket is cut to what is left of the call that the thread is making; whatever the library does
in between, it cannot wait longer.
"""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from redis import ConnectionPool, Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, parse_url
from redis.retry import Retry

from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from kvstrata.config.schema import ValkeyTierConfig

Command: TypeAlias = tuple[str | bytes | int, ...]
Reply: TypeAlias = object

MAX_CALLS: Final = 16
"""Calls under way at once, and so the most connections to one server."""
_SOCKET_READ_BYTES: Final = 2**20
_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss"}


class _TimeLimit(threading.local):
    """How long the current thread may wait; outside of a call, not at all."""

    deadline = 0.0
    timeout_s = 0.0

    def wait_s(self) -> float:
        """The longest wait now.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left_s, self.timeout_s)


_LIMIT: Final = _TimeLimit()


@contextlib.contextmanager
def time_limit(deadline: float, timeout_s: float) -> Iterator[None]:
    """Bound every wait of this thread on these connections: by the deadline, each by the timeout.

    Calls do not nest.
    """
    _LIMIT.deadline, _LIMIT.timeout_s = deadline, timeout_s
    try:
        yield
    finally:
        _LIMIT.deadline = 0.0


class _BoundedSocket:
    """A socket that waits within the time limit of the thread that uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_polling = False

    def settimeout(self, seconds: float | None) -> None:
        """Zero means polling; anything else is left to the time limit."""
        self._is_polling = seconds == 0

    def recv(self, size: int) -> bytes:
        """As `socket.recv`, within the limit."""
        return self._armed().recv(size)

    def recv_into(self, *args: Any) -> int:  # noqa: ANN401 - passed through
        """As `socket.recv_into`, within the limit."""
        return self._armed().recv_into(*args)

    def sendall(self, data: bytes | memoryview) -> None:
        """As `socket.sendall`; a TLS socket's own would start its timeout with every record."""
        view = memoryview(data)
        while view:
            view = view[self._armed().send(view) :]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest of a socket
        return getattr(self._sock, name)

    def _armed(self) -> socket.socket:
        self._sock.settimeout(0 if self._is_polling else _LIMIT.wait_s())
        return self._sock


class _BoundedConnection(Connection):
    """A connection whose waits keep the time limit, connecting included."""

    # Read before each of the addresses that a name stands for, so they share what is left.
    @property
    def socket_connect_timeout(self) -> float:
        return _LIMIT.wait_s()

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: float | None) -> None:
        pass

    def _connect(self) -> _BoundedSocket:
        return _BoundedSocket(super()._connect())


class _BoundedSSLConnection(_BoundedConnection, SSLConnection):
    """The same over TLS, the handshake included."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(_LIMIT.wait_s())
        wrapped: socket.socket = super()._wrap_socket_with_ssl(sock)
        return wrapped


class Share(NamedTuple):
    """One server's share of a batch."""

    server: Redis
    positions: list[int]
    """Of its names in the batch, ascending."""


class Servers(Protocol):
    """All servers of one tier. Called within `time_limit` only, from several threads at once."""

    def route(self, names: Sequence[str]) -> list[Share]:
        """Which server keeps which names."""
        ...

    def follow(self, command: Command) -> Reply:
        """Send a command again whose key is on its way to another server."""
        ...

    def suspect(self) -> None:
        """A server did not do its part: look anew who keeps what, at the next call."""
        ...

    def disconnect(self) -> None:
        """Drop the connections that no call is using. Needs no time limit."""
        ...


class SingleServer:
    """Everything on one server."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._redis = Redis(connection_pool=ConnectionPool(**options))

    def route(self, names: Sequence[str]) -> list[Share]:
        """All names on the one server."""
        return [Share(self._redis, list(range(len(names))))]

    def follow(self, command: Command) -> Reply:
        """A single server sends nobody elsewhere; if it does, its error says so."""
        return self._redis.execute_command(*command)

    def suspect(self) -> None:
        """There is no other server to look for."""

    def disconnect(self) -> None:
        """Drop the idle connections."""
        self._redis.connection_pool.disconnect(inuse_connections=False)


class ServerCluster:
    """Names spread over the servers of a cluster, which is asked at the first call.

    Ownership: `_cluster` is set once under `_lock`; `_is_stale` is set by any thread, and cleared
    under `_lock`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._is_stale = False

    def route(self, names: Sequence[str]) -> list[Share]:
        """One share for each primary concerned."""
        cluster = self._current()
        shares: dict[str, Share] = {}
        for position, name in enumerate(names):
            node = cluster.get_node_from_key(name)
            if node.name not in shares:
                shares[node.name] = Share(cluster.get_redis_connection(node), [])
            shares[node.name].positions.append(position)
        return list(shares.values())

    def follow(self, command: Command) -> Reply:
        """Let the cluster client follow the redirection and remember it."""
        return self._current().execute_command(*command)

    def suspect(self) -> None:
        """A replica may have taken over."""
        self._is_stale = True

    def disconnect(self) -> None:
        """Drop the idle connections to every node."""
        nodes = self._cluster.get_nodes() if self._cluster else []
        for node in nodes:
            if node.redis_connection:
                node.redis_connection.connection_pool.disconnect(inuse_connections=False)

    def _current(self) -> RedisCluster:
        if not self._lock.acquire(timeout=_LIMIT.wait_s()):
            raise TimeoutError("another call is still looking for the cluster's servers")
        try:
            if self._cluster is None:
                self._cluster = _open_cluster(self._options)
            elif self._is_stale:
                self._cluster.nodes_manager.initialize()
            self._is_stale = False
            return self._cluster
        finally:
            self._lock.release()


def open_servers(config: ValkeyTierConfig) -> Servers:
    """The servers behind a configured address. Connects to nothing yet.

    Raises:
        ConfigError: the address cannot be read.
    """
    options = _options(config)
    return ServerCluster(options) if config.cluster else SingleServer(options)


def secrets_of(config: ValkeyTierConfig) -> tuple[str, ...]:
    """What must never be shown: the password, as it is and as it stands in the address."""
    spelled = urlsplit(config.url).password or ""
    return (spelled, unquote(spelled))


def _options(config: ValkeyTierConfig) -> dict[str, Any]:
    scheme, colon, rest = config.url.partition(":")
    try:
        options = dict(parse_url(_SCHEMES[scheme] + colon + rest))
    except ValueError:
        # The parser's own message can hold the password, where it takes a part of it for a port.
        raise ConfigError(
            "tiers[].url", "is no address", "valkey://[user:password@]host[:port][/database]"
        ) from None
    is_tls = options.pop("connection_class", None) is SSLConnection
    return options | {
        "connection_class": _BoundedSSLConnection if is_tls else _BoundedConnection,
        "max_connections": MAX_CALLS,
        "socket_timeout": float(config.timeout),
        "socket_read_size": _SOCKET_READ_BYTES,
        "retry": Retry(NoBackoff(), 0),  # the hierarchy decides about a second try
        "protocol": 2,  # no pushed messages: bytes on an idle connection are a stale reply
    }


def _open_cluster(options: dict[str, Any]) -> RedisCluster:
    others = {name: value for name, value in options.items() if name not in {"host", "port", "db"}}
    host, port = options.get("host", "localhost"), options.get("port", 6379)
    host = f"[{host}]" if ":" in host else host
    return RedisCluster(
        # Only with an address does the client use the connection class it is given.
        url=f"redis://{host}:{port}",
        connection_pool_class=ConnectionPool,
        require_full_coverage=False,  # the chunks of the other slots are still there
        **others,
    )
