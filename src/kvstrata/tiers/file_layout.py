"""Where things lie in a store's directory.

    store.json                              says that this directory is a store, and its format
    usage                                   bytes used and written today, shared by all processes
    janitor.lock                            held by the one process that evicts
    namespaces/<fingerprint>/<xx>/<key>.<rank>of<ranks>    one file per chunk and rank
    namespaces/<fingerprint>/<xx>/.<token>-<pid>-<n>.tmp   a file being written, locked
    quarantine/<key>.<rank>of<ranks>        what failed a check, for an operator to look at

A directory holds many namespaces side by side. All directories are made 0700.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
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
_OWN_NAMES: Final = frozenset({"store.json", "usage", "janitor.lock", "namespaces", "quarantine"})
_TEMPORARY: Final = ".tmp"
_NEW_S: Final = 10
"""A temporary file is no leftover for so long."""


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
        """Make the store, or check that there is one. Processes may do so at the same time.

        Raises:
            ConfigError: the directory holds something else, or cannot be made.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.manifest.exists():
                self._create()
            for folder in (self.namespaces, self.quarantine):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "path", f"{self.root} cannot be used: {error.strerror}", "a writable directory"
            ) from error
        if not self.is_store():
            raise ConfigError(
                "path", f"{self.root} is a store of another format", f"a store of format {FORMAT}"
            )

    def _create(self) -> None:
        """Publish the manifest, whole and once, whoever is first."""
        names = {path.name for path in self.root.iterdir()}
        foreign = {name for name in names - _OWN_NAMES if not is_temporary(name)}
        if foreign and not self.manifest.exists():
            raise ConfigError(
                "path",
                f"{self.root} holds files that are no kvstrata store",
                "a new or empty directory, or an existing store",
            )
        temporary = Path(temporary_path(self.root))
        temporary.write_text(json.dumps({"kvstrata": FORMAT}))
        try:
            self.manifest.hardlink_to(temporary)
        except FileExistsError:
            pass  # another process was first
        except OSError:  # no hard links here; all who come at once write the same
            temporary.replace(self.manifest)
        finally:
            temporary.unlink(missing_ok=True)


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


_TOKEN: Final = secrets.token_hex(4)
_counter: Final = itertools.count()


def temporary_path(folder: Path | str) -> str:
    """A name that no other process or thread uses."""
    return f"{folder}/.{_TOKEN}-{os.getpid()}-{next(_counter)}{_TEMPORARY}"


def is_leftover(path: str, used_ns: int) -> bool:
    """Whether a temporary file's writer is gone.

    A writer holds a lock on its file, which is freed with the writer however it ends, wherever it
    runs. A file is given a little time, because its lock comes after its name.
    """
    if time.time_ns() - used_ns < _NEW_S * 10**9:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return
