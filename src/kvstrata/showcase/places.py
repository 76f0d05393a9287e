"""Where the showcase keeps chunks: each tier with a place of its own that goes away with it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata.errors import ConfigError
from kvstrata.showcase.local_servers import HOST, redis_server, s3_server
from kvstrata.telemetry.event_tracker import HOST as HOST_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_BUCKET: Final = "showcase"
_CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "showcase", "AWS_SECRET_ACCESS_KEY": "anything"}


@dataclass(frozen=True, slots=True)
class Place:
    """A tier to restore from."""

    tier: str
    about: str
    """What stands behind it."""
    settings: Mapping[str, Any] | None = None
    """As in a configuration's `tiers`; None: host memory, which every configuration has."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A tier that is not there."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Places:
    """What can be shown, and what not."""

    places: tuple[Place, ...]
    skipped: tuple[Skipped, ...]


class _NotThereError(Exception):
    """A tier needs something that this machine has not got."""


@contextlib.contextmanager
def open_places(tiers: Sequence[str], folder: Path) -> Iterator[Places]:
    """Start what the tiers need, and stop it in the end.

    Args:
        tiers: names of `TIERS`.
        folder: a temporary directory.

    Raises:
        ConfigError: there is no such tier.
    """
    for tier in tiers:
        if tier not in _OPENERS:
            raise ConfigError("tiers", f"{tier!r} is not a tier of the demo", ", ".join(TIERS))
    places: list[Place] = []
    skipped: list[Skipped] = []
    with contextlib.ExitStack() as servers:
        for tier in tiers:
            try:
                places.append(_OPENERS[tier](folder / tier, servers))
            except _NotThereError as error:
                skipped.append(Skipped(tier, str(error)))
        yield Places(tuple(places), tuple(skipped))


def _open_host(folder: Path, servers: contextlib.ExitStack) -> Place:  # noqa: ARG001 - as the others
    return Place(HOST_MEMORY, "host memory")


def _open_filesystem(folder: Path, servers: contextlib.ExitStack) -> Place:  # noqa: ARG001
    settings = {"kind": "filesystem", "path": str(folder), "min_free": "0B"}
    return Place("filesystem", "a temporary folder", settings)


def _open_valkey(folder: Path, servers: contextlib.ExitStack) -> Place:
    _require("redis", "valkey")
    folder.mkdir()
    try:
        server = servers.enter_context(redis_server(folder))
    except (FileNotFoundError, TimeoutError) as error:
        raise _NotThereError(str(error)) from error
    settings = {"kind": "valkey", "url": f"valkey://{HOST}:{server.port}/0", "timeout": "20s"}
    return Place("valkey", f"a server on port {server.port} of the loopback", settings)


def _open_object_store(folder: Path, servers: contextlib.ExitStack) -> Place:
    _require("obstore", "s3")
    folder.mkdir()
    settings = {"kind": "object_store", "timeout": "20s"}
    if not all(map(importlib.util.find_spec, ("moto", "flask"))):
        url = f"file://{folder.resolve()}"
        return Place("object_store", "a temporary folder behind obstore", settings | {"url": url})
    try:
        server = servers.enter_context(s3_server(folder, _BUCKET))
    except TimeoutError as error:
        raise _NotThereError(str(error)) from error
    servers.enter_context(_credentials())
    address = {
        "url": f"s3://{_BUCKET}/chunks",
        "endpoint": f"http://{HOST}:{server.port}",
        "region": "us-east-1",
    }
    about = f"moto's S3 server on port {server.port} of the loopback"
    return Place("object_store", about, settings | address)


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise _NotThereError(f"{module} is not installed: pip install 'kvstrata[{extra}]'")


@contextlib.contextmanager
def _credentials() -> Iterator[None]:
    """Credentials for a server that takes any; those of the user are left as they are."""
    missing = {name: value for name, value in _CREDENTIALS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


_OPENERS: Final[Mapping[str, Callable[[Path, contextlib.ExitStack], Place]]] = {
    HOST_MEMORY: _open_host,
    "filesystem": _open_filesystem,
    "valkey": _open_valkey,
    "object_store": _open_object_store,
}
TIERS: Final = tuple(_OPENERS)
"""Everything that can be shown, fastest first."""
