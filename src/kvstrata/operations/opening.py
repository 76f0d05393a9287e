"""From what an operator types to the store behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from kvstrata.config.addresses import without_credentials
from kvstrata.errors import ConfigError
from kvstrata.operations.listing import shown_name

if TYPE_CHECKING:
    from kvstrata.operations.listing import StoreListing

_BUCKET_SCHEMES: Final = frozenset(
    {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https"}
)
_VALKEY_SCHEMES: Final = frozenset({"valkey", "valkeys", "redis", "rediss"})
_ACCEPTED: Final = "a directory, or an address with file://, s3://, gs://, az:// or valkey://"


def open_listing(address: str) -> StoreListing:
    """The store at a path or address.

    Raises:
        ConfigError: there is no store, the scheme is unknown, or a package is missing.
        TierUnavailable: a server cannot be reached.
    """
    from kvstrata.operations.directory_listing import (  # noqa: PLC0415 - load what runs
        DirectoryListing,
    )

    scheme = address.partition("://")[0] if "://" in address else "file"
    if scheme in _BUCKET_SCHEMES:
        return _open_bucket(address)
    if scheme in _VALKEY_SCHEMES:
        return _open_valkey(address)
    return DirectoryListing(directory_path(address))


def directory_path(address: str) -> Path:
    """The directory behind a path or a file:// address.

    Raises:
        ConfigError: it is an address of something else.
    """
    if not address:  # an unset variable of a script, not the current directory
        raise ConfigError("PATH", "is empty", _ACCEPTED)
    if "://" not in address:
        return Path(address)
    parts = urlsplit(address)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"}:
        shown = shown_name(without_credentials(address))
        raise ConfigError(shown, "no directory's address", _ACCEPTED)
    return Path(unquote(parts.path))


def _open_bucket(address: str) -> StoreListing:
    try:
        from kvstrata.operations.bucket_listing import BucketListing  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(address, error, "kvstrata[s3]") from error
    return BucketListing(address)


def _open_valkey(address: str) -> StoreListing:
    try:
        from kvstrata.operations.valkey_listing import ValkeyListing  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(address, error, "kvstrata[valkey]") from error
    return ValkeyListing(address)


def _missing(address: str, error: ModuleNotFoundError, extra: str) -> ConfigError:
    shown = shown_name(without_credentials(address))
    return ConfigError(
        shown, f"needs the package {error.name}", f"this after pip install '{extra}'"
    )
