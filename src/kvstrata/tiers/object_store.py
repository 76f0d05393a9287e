"""Chunks in a bucket: one object for each rank's part, in S3 or another store obstore knows.

A store has a thread of its own with an event loop, where the requests of all calls run side by
side. A request is cancelled at its deadline, whatever the network does.

Ownership: payloads are copied and verified on the loop's thread, between two awaits, so that a
cancelled request never touches a buffer whose owner has gone on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import from_url

from kvstrata.errors import (
    ChunkCorrupt,
    ClosedError,
    ConfigError,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from kvstrata.tiers.chunk_facts import Presence, outcome_of, shown
from kvstrata.tiers.chunk_format import BadChunk, key_name
from kvstrata.tiers.raw_chunk import check_size, fill, raw_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from kvstrata.config.schema import ObjectStoreTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline, TierOutcome
    from kvstrata.errors import TierError
    from kvstrata.tiers.chunk_facts import Fact

_Job: TypeAlias = Callable[[], Awaitable[Presence]]
_PART_BYTES: Final = 64 * 2**20
"""Larger chunks are uploaded in parts of this size."""
_CLOSE_S: Final = 5.0
_MAX_RETRIES: Final = 2
_MAX_CONNECT_S: Final = 5.0
_NO_ROOM: Final = (
    "(os error 28)", "QuotaExceeded", "InsufficientCapacity", "StorageFull", "507 Insufficient",
)  # fmt: skip


class BucketStore:
    """A `ChunkStore` over a bucket, or a part of one.

    Credentials come from the environment or the machine's own metadata service, never from the
    configuration. Connects at the first call.

    Ownership: `_is_closed` is set once under `_lock`; tasks live on the loop's thread alone.

    Raises:
        ConfigError: the address, endpoint or region makes no sense.
    """

    def __init__(self, config: ObjectStoreTierConfig, namespace: Namespace, rank: Rank) -> None:
        self._name = config.name or "object_store"
        self._timeout_s = float(config.timeout)
        self._namespace = namespace
        self._folder = namespace.fingerprint
        self._rank = rank
        self._secrets = _secrets_of(config)
        self._bucket = _open_bucket(config, self._secrets)
        self._turns = asyncio.Semaphore(config.concurrency)
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name=f"kvstrata-{self._name}", daemon=True
        )
        self._thread.start()

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Fill the buffers; a chunk is done only if size, checksum and header are right.

        Raises:
            ClosedError: after `close`, or closed meanwhile.
        """
        return self._outcome([(c.label.key, partial(self._read, c)) for c in chunks], deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Keep the buffers' payloads. Atomic for each chunk.

        Raises:
            ClosedError: after `close`, or closed meanwhile.
        """
        return self._outcome([(c.label.key, partial(self._write, c)) for c in chunks], deadline)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Which keys every rank has; verifies nothing and reads no payload.

        Raises:
            ClosedError: after `close`, or closed meanwhile.
        """
        return self._outcome([(key, partial(self._find, key)) for key in keys], deadline)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Drop this rank's part of the keys.

        Raises:
            ClosedError: after `close`, or closed meanwhile.
        """
        return self._outcome([(key, partial(self._remove, key)) for key in keys], deadline)

    def close(self) -> None:
        """Cancel what is under way and end the thread. Does nothing on successive calls."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)

    async def _read(self, chunk: ChunkBuffer) -> Presence:
        try:
            found = await self._bucket.get_async(self._object_name(chunk.label.key))
            check_size(found.meta["size"], chunk.label)
            raw = memoryview(await found.bytes_async())
        except FileNotFoundError:
            return Presence.ABSENT
        fill(chunk, raw, self._namespace, self._rank)
        return Presence.DONE

    async def _write(self, chunk: ChunkBuffer) -> Presence:
        # A copy: an upload that is being cancelled may still read its bytes for a moment.
        raw = b"".join(raw_parts(chunk, self._namespace, self._rank))
        # One part at a time, since the configured concurrency counts requests.
        await self._bucket.put_async(
            self._object_name(chunk.label.key), raw, chunk_size=_PART_BYTES, max_concurrency=1
        )
        return Presence.DONE

    async def _find(self, key: ChunkKey) -> Presence:
        for index in range(self._rank.count):
            if not await self._has(self._object_name(key, index)):
                return Presence.ABSENT
        return Presence.DONE

    async def _remove(self, key: ChunkKey) -> Presence:
        # S3 deletes what is not there without a word, so it is asked first.
        if not await self._has(self._object_name(key)):
            return Presence.ABSENT
        await self._bucket.delete_async(self._object_name(key))
        return Presence.DONE

    async def _has(self, name: str) -> bool:
        try:
            await self._bucket.head_async(name)
        except FileNotFoundError:
            return False
        return True

    def _object_name(self, key: ChunkKey, rank_index: int | None = None) -> str:
        name = key_name(key)
        index = self._rank.index if rank_index is None else rank_index
        return f"{self._folder}/{name[:2]}/{name}.{index}of{self._rank.count}"

    def _outcome(self, jobs: Sequence[tuple[ChunkKey, _Job]], deadline: Deadline) -> TierOutcome:
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"tier {self._name} is closed")
            facts = asyncio.run_coroutine_threadsafe(self._facts(jobs, deadline), self._loop)
        try:
            return outcome_of(facts.result())
        except concurrent.futures.CancelledError:
            raise ClosedError(f"tier {self._name} was closed meanwhile") from None

    async def _facts(
        self, jobs: Sequence[tuple[ChunkKey, _Job]], deadline: Deadline
    ) -> list[tuple[ChunkKey, Fact]]:
        facts = await asyncio.gather(*(self._fact(key, job, deadline) for key, job in jobs))
        return [(key, fact) for (key, _), fact in zip(jobs, facts, strict=True)]

    async def _fact(self, key: ChunkKey, job: _Job, deadline: Deadline) -> Fact:
        try:
            # The loop's clock is the monotonic one, as the deadline's.
            async with asyncio.timeout_at(deadline), self._turns:
                async with asyncio.timeout(self._timeout_s):
                    return await job()
        except BadChunk as error:
            return ChunkCorrupt(self._name, str(error), [key])
        except TimeoutError:
            return TierTimeout(self._name, "no answer in time", [key])
        except Exception as error:  # noqa: BLE001 - one job must not end while others still write
            return self._fault(error, key)

    def _fault(self, error: Exception, key: ChunkKey) -> TierError:
        text = shown(error, self._secrets)
        is_full = any(sign in str(error) for sign in _NO_ROOM)
        return (TierFull if is_full else TierUnavailable)(self._name, text, [key])


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end what is left on it."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
    finally:
        loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _secrets_of(config: ObjectStoreTierConfig) -> tuple[str, ...]:
    return tuple(
        urlsplit(address).password or "" for address in (config.url, config.endpoint) if address
    )


def _open_bucket(config: ObjectStoreTierConfig, secrets: tuple[str, ...]) -> ObjectStore:
    try:
        if config.url.startswith("file:"):
            return from_url(config.url, mkdir=True)
        if config.url.startswith("memory:"):
            return from_url(config.url)
        return from_url(
            config.url,
            config=_place(config),
            client_options=_client_options(config),
            retry_config=_retry_config(config),
        )
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            "tiers[]", f"cannot be opened: {shown(error, secrets)}", "s3://bucket/prefix"
        ) from None


def _place(config: ObjectStoreTierConfig) -> S3Config:
    place: S3Config = {}
    if config.endpoint is not None:
        place["endpoint"] = config.endpoint
    if config.region is not None:
        place["region"] = config.region
    return place


def _client_options(config: ObjectStoreTierConfig) -> ClientConfig:
    return {
        "allow_http": (config.endpoint or config.url).startswith("http:"),
        "connect_timeout": timedelta(seconds=min(config.timeout, _MAX_CONNECT_S)),
        # A backstop: the loop's own timeout comes first, and says that it was one.
        "timeout": timedelta(seconds=2 * config.timeout),
    }


def _retry_config(config: ObjectStoreTierConfig) -> RetryConfig:
    return {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=config.timeout),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=500),
        },
    }
