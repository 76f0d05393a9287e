"""A Valkey or Redis server, or a cluster of them, as operators see it.

Bad chunks are deleted, since memory is no place to keep them. The server is asked not to take
looking for using (`CLIENT NO-TOUCH`); servers older than 7.2 cannot be, and note the reading.
"""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from redis import Redis, RedisCluster
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from kvstrata.config.addresses import without_credentials
from kvstrata.errors import ConfigError, TierUnavailable
from kvstrata.operations.listing import Housekeeping, Place, chunk_at, shown_name
from kvstrata.tiers.chunk_facts import shown
from kvstrata.tiers.chunk_format import HEADER_BYTES, VERSION

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from redis.connection import Connection

_VALUE_NAME: Final = re.compile(r"kvstrata:([0-9a-f]{40}):\{([0-9a-f]+)\}:(\d+of\d+)")
_BATCH: Final = 500
_TIMEOUT_S: Final = 10.0
_FAULTS: Final = (RedisError, RedisClusterException, OSError)
_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}


class ValkeyListing:
    """A `StoreListing` over a server or a cluster, which is recognised.

    Raises:
        ConfigError: the address makes no sense, or the server keeps no chunks.
        TierUnavailable: the server cannot be reached.
    """

    def __init__(self, address: str) -> None:
        self.address = shown_name(without_credentials(address))
        self.medium = f"valkey, format {VERSION}"
        spelled = _password(address)
        self._secrets = (spelled, unquote(spelled))
        self._server = self._connect(address)
        if next(self.places(), None) is None:
            self.close()
            raise ConfigError(self.address, "no kvstrata store", "a server that keeps chunks")

    def places(self) -> Iterator[Place]:
        """Every value that is named like a chunk. Changes nothing.

        Raises:
            TierUnavailable: the server does not answer.
        """
        try:
            names = map(_text, self._server.scan_iter(match="kvstrata:*", count=_BATCH))
            while batch := list(itertools.islice(names, _BATCH)):
                yield from self._described(batch)
        except _FAULTS as error:
            raise TierUnavailable(self.address, shown(error, self._secrets)) from None

    def read(self, place: Place, most_bytes: int | None = None) -> Generator[memoryview]:
        """The value.

        Raises:
            FileNotFoundError: it went away meanwhile.
            OSError: the server does not answer.
        """
        with self._faults_as_os_errors():
            if most_bytes is None:
                value = self._server.get(place.name)
            else:
                value = self._server.getrange(place.name, 0, most_bytes - 1)
        if not isinstance(value, bytes):
            raise FileNotFoundError(place.name)
        raw = memoryview(value)
        yield raw[:HEADER_BYTES]
        yield raw[HEADER_BYTES:]

    def quarantine(self, place: Place) -> str:
        """Delete the value.

        Raises:
            FileNotFoundError: it went away meanwhile.
            OSError: the server does not answer.
        """
        with self._faults_as_os_errors():
            if not self._server.unlink(place.name):
                raise FileNotFoundError(place.name)
        return "deleted"

    def housekeeping(self) -> Housekeeping:
        """A server keeps nothing besides chunks."""
        return Housekeeping()

    def correct_usage(self) -> bool:
        """A server counts for itself."""
        return True

    def close(self) -> None:
        """Let go of the connections. Does nothing on successive calls."""
        self._server.close()

    def _connect(self, address: str) -> Redis | RedisCluster:
        options: dict[str, Any] = {
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            "redis_connect_func": _connect_untouching,
        }
        url = _redis_url(address)
        try:
            server = Redis.from_url(url, **options)
            if not server.info("cluster").get("cluster_enabled"):
                return server
            server.close()
            return RedisCluster.from_url(url, **options)
        except ValueError:
            # The parser's own message can hold the password.
            raise ConfigError(self.address, "no address", "valkey://host[:port][/db]") from None
        except _FAULTS as error:
            raise TierUnavailable(self.address, shown(error, self._secrets)) from None

    def _described(self, names: Sequence[str]) -> Iterator[Place]:
        found = [match for name in names if (match := _VALUE_NAME.fullmatch(name))]
        with self._server.pipeline(transaction=False) as pipeline:
            for match in found:
                pipeline.strlen(match[0])
            sizes = pipeline.execute(raise_on_error=False)
        for match, size in zip(found, sizes, strict=True):
            chunk = chunk_at(match[2][:2], f"{match[2]}.{match[3]}")
            if chunk is not None and isinstance(size, int) and size:
                yield Place(match[0], match[1], chunk, size, self._used_ns(match[0]))

    def _used_ns(self, name: str) -> int | None:
        """The last use as far as the server knows: not with an LFU policy."""
        try:
            idle_s = self._server.object("IDLETIME", name)
        except (ResponseError, RedisClusterException):
            return None
        return None if idle_s is None else time.time_ns() - int(idle_s) * 10**9

    @contextmanager
    def _faults_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, RedisClusterException) as error:
            raise OSError(shown(error, self._secrets)) from None


def _connect_untouching(connection: Connection) -> None:
    """Set a connection up so that reading through it is no use."""
    connection.on_connect()
    connection.send_command("CLIENT", "NO-TOUCH", "ON")
    try:
        connection.read_response()
    except ResponseError:
        return  # an older server


def _redis_url(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{_SCHEMES.get(scheme, scheme)}://{rest}"


def _password(address: str) -> str:
    try:
        return urlsplit(address).password or ""
    except ValueError:
        return ""


def _text(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
