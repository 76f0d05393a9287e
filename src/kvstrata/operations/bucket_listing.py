"""A bucket, or a part of one, as operators see it.

Bad chunks move to `quarantine/` next to the namespaces, where no reader looks. A bucket knows no
last uses and has no counter. Credentials, endpoint and region come from the environment.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import from_url

from kvstrata.config.addresses import without_credentials
from kvstrata.errors import ConfigError, TierUnavailable
from kvstrata.operations.listing import Housekeeping, Place, Totals, chunk_at, shown_name
from kvstrata.tiers.chunk_facts import shown
from kvstrata.tiers.chunk_format import HEADER_BYTES, VERSION

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from obstore import ObjectMeta
    from obstore.store import ObjectStore, RetryConfig

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{40}")
_PARTS: Final = 3
_QUARANTINE: Final = "quarantine"
# An operator waits: the library's own limit is minutes.
_RETRIES: Final[RetryConfig] = {"max_retries": 2, "retry_timeout": timedelta(seconds=60)}


class BucketListing:
    """A `StoreListing` over a bucket.

    Raises:
        ConfigError: the address makes no sense, or there is no namespace behind it.
        TierUnavailable: the bucket cannot be listed.
    """

    def __init__(self, address: str) -> None:
        self.address = shown_name(without_credentials(address))
        self.medium = f"bucket, format {VERSION}"
        self._secrets = (urlsplit(address).password or "",)
        self._bucket = self._open(address)
        if not self._namespaces():
            raise ConfigError(self.address, "no kvstrata store", "an address with chunks below it")

    def places(self) -> Iterator[Place]:
        """Every object in a namespace that is named like a chunk. Changes nothing.

        Others are left alone: a bucket may hold anything.

        Raises:
            TierUnavailable: the bucket cannot be listed.
        """
        for namespace in self._namespaces():
            for found in self._objects(namespace):
                place = _place(found)
                if place is not None:
                    yield place

    def read(self, place: Place, most_bytes: int | None = None) -> Generator[memoryview]:
        """The object's bytes.

        Raises:
            FileNotFoundError: it went away meanwhile.
            OSError: it cannot be read.
        """
        with self._faults_as_os_errors():
            if most_bytes is not None:
                yield memoryview(self._bucket.get_range(place.name, start=0, length=most_bytes))
                return
            yield from _header_first(map(memoryview, self._bucket.get(place.name).stream()))

    def quarantine(self, place: Place) -> str:
        """Move the object.

        Raises:
            FileNotFoundError: it went away meanwhile.
            OSError: it cannot be moved.
        """
        target = f"{_QUARANTINE}/{place.name.rpartition('/')[2]}"
        with self._faults_as_os_errors():
            self._bucket.rename(place.name, target)
        return target

    def housekeeping(self) -> Housekeeping:
        """The quarantine; uploads are atomic, so there are no leftovers. Changes nothing."""
        sizes = (found["size"] for found in self._objects(_QUARANTINE))
        return Housekeeping(quarantined=Totals.of(sizes))

    def correct_usage(self) -> bool:
        """A bucket has no counter."""
        return True

    def close(self) -> None:
        """Connections go with the object."""

    def _open(self, address: str) -> ObjectStore:
        try:
            return from_url(address, retry_config=_RETRIES)
        except (BaseError, OSError, ValueError) as error:
            problem = f"cannot be opened: {shown(error, self._secrets)}"
            raise ConfigError(self.address, problem, "s3://bucket/prefix") from None

    def _namespaces(self) -> list[str]:
        try:
            folders = self._bucket.list_with_delimiter()["common_prefixes"]
        except (BaseError, OSError) as error:
            raise TierUnavailable(self.address, shown(error, self._secrets)) from None
        names = (folder.strip("/") for folder in folders)
        return sorted(name for name in names if _FINGERPRINT.fullmatch(name))

    def _objects(self, folder: str) -> Iterator[ObjectMeta]:
        try:
            for batch in self._bucket.list(folder):
                yield from batch
        except (BaseError, OSError) as error:
            raise TierUnavailable(self.address, shown(error, self._secrets)) from None

    @contextmanager
    def _faults_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, ValueError) as error:
            raise OSError(shown(error, self._secrets)) from None


def _place(found: ObjectMeta) -> Place | None:
    parts = found["path"].split("/")
    chunk = chunk_at(*parts[1:]) if len(parts) == _PARTS else None
    if chunk is None:
        return None
    return Place(name=found["path"], namespace=parts[0], chunk=chunk, num_bytes=found["size"])


def _header_first(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes, cut so that the header page is a piece of its own."""
    head = b""
    for piece in pieces:
        if len(head) == HEADER_BYTES:
            yield piece
            continue
        wanted = HEADER_BYTES - len(head)
        head += piece[:wanted]
        if len(head) == HEADER_BYTES:
            yield memoryview(head)
            yield piece[wanted:]
    if len(head) < HEADER_BYTES:
        yield memoryview(head)
