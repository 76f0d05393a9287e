"""Where things lie in a store's directory.

    store.json                              says that this directory is a store, and its format
    usage                                   bytes used and written today, shared by all processes
    janitor.lock                            held by the one process that evicts
    namespaces/<fingerprint>/<xx>/<key>.<rank>of<ranks>    one file per chunk and rank
    namespaces/<fingerprint>/<xx>/.<host>-<pid>-<n>.tmp    a file being written
    quarantine/<key>.<rank>of<ranks>        what failed a check, for an operator to look at

A directory holds many namespaces side by side. All directories are made 0700.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.core.chunk_label import Rank
from kvstrata.core.ids import ChunkKey
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.core.chunk_label import Namespace

FORMAT: Final = 1
_FAN_OUT: Final = 2
_TEMPORARY: Final = ".tmp"
_STALE_S: Final = 3600
"""A temporary file this old was left behind by another host's writer."""


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """The paths inside one store."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Says that this is a store."""
        return self.root / "store.json"

    @property
    def usage(self) -> Path:
        """The shared counters."""
        return self.root / "usage"

    @property
    def janitor_lock(self) -> Path:
        """Held by the process that evicts."""
        return self.root / "janitor.lock"

    @property
    def namespaces(self) -> Path:
        """All namespaces."""
        return self.root / "namespaces"

    @property
    def quarantine(self) -> Path:
        """What failed a check."""
        return self.root / "quarantine"

    def chunk(self, namespace: Namespace, key: ChunkKey, rank: Rank) -> Path:
        """The file of one rank's part of a chunk."""
        name = key.hex()
        return self.namespace(namespace.fingerprint) / name[:_FAN_OUT] / file_name(key, rank)

    def namespace(self, fingerprint: str) -> Path:
        """One namespace's folder."""
        return self.namespaces / fingerprint

    def is_store(self) -> bool:
        """Whether this directory holds a store of a format this version knows."""
        try:
            manifest = json.loads(self.manifest.read_text())
            return bool(manifest["kvstrata"] == FORMAT)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def prepare(self) -> None:
        """Make the store, or check that there is one.

        Raises:
            ConfigError: the directory holds something else, or cannot be made.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.is_store():
                self._create()
            for folder in (self.namespaces, self.quarantine):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "path", f"{self.root} cannot be used: {error.strerror}", "a writable directory"
            ) from error

    def _create(self) -> None:
        if any(self.root.iterdir()) and not self.manifest.exists():
            raise ConfigError(
                "path",
                f"{self.root} holds files that are no kvstrata store",
                "a new or empty directory, or an existing store",
            )
        if self.manifest.exists():
            raise ConfigError(
                "path", f"{self.root} is a store of another format", f"a store of format {FORMAT}"
            )
        temporary = temporary_path(self.root)
        temporary.write_text(json.dumps({"kvstrata": FORMAT}))
        temporary.replace(self.manifest)


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk's file as its name tells it."""

    path: str
    key: ChunkKey
    rank: Rank


def file_name(key: ChunkKey, rank: Rank) -> str:
    """A chunk's file name."""
    return f"{key.hex()}.{rank.index}of{rank.count}"


def parse_file_name(name: str) -> tuple[ChunkKey, Rank] | None:
    """What a file name says; None when it is no chunk's."""
    stem, _, ranks = name.partition(".")
    index, _, count = ranks.partition("of")
    try:
        return ChunkKey(bytes.fromhex(stem)), Rank(int(index), int(count))
    except ValueError:
        return None


def chunk_files(namespace: Path) -> Iterator[os.DirEntry[str]]:
    """Every file in a namespace's folder, temporary ones too. Reads names alone."""
    for folder in _entries(namespace):
        if folder.is_dir(follow_symlinks=False):
            yield from _entries(folder.path)


def is_temporary(name: str) -> bool:
    """Whether a file is, or was, being written."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


_HOST: Final = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_counter: Final = itertools.count()


def temporary_path(folder: Path) -> Path:
    """A name nobody else uses, which tells who is writing."""
    return folder / f".{_HOST}-{os.getpid()}-{next(_counter)}{_TEMPORARY}"


def is_leftover(name: str, used_ns: int) -> bool:
    """Whether a temporary file's writer is gone, or must be by now."""
    return _is_abandoned(name) or time.time_ns() - used_ns > _STALE_S * 10**9


def _is_abandoned(name: str) -> bool:
    """Whether a temporary file's writer ran on this host and is gone."""
    host, _, rest = name.removeprefix(".").partition("-")
    pid = rest.partition("-")[0]
    return host == _HOST and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return
