"""Every file of a store's directory, with what its name, its folder and its inode say."""

from __future__ import annotations

import enum
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.errors import ConfigError, TierUnavailable
from kvstrata.operations.listing import shown_name
from kvstrata.operations.unnoticed import opened_unnoticed
from kvstrata.tiers.chunk_format import BadChunk
from kvstrata.tiers.file_layout import FORMAT, StoreDirectory, is_leftover, is_temporary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MANIFEST_BYTES: Final = 4096
_ACCEPTED: Final = "a kvstrata store: a directory, file://, s3:// or valkey:// address"


class Role(enum.Enum):
    """Why a file is there."""

    CHUNK = "chunk"
    """It lies where chunks do; whether it is one is for others to say."""
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """One file."""

    path: str
    role: Role
    namespace: str
    """The folder's name; empty in quarantine."""
    owner: int
    """User id of the namespace's owner; in quarantine, of the file's."""
    num_bytes: int
    used_ns: int
    is_regular: bool

    @property
    def is_leftover(self) -> bool:
        """Whether it is what a crashed writer left."""
        is_temporary = self.role is Role.TEMPORARY
        return is_temporary and is_leftover(self.path, self.used_ns)


def open_directory(root: Path) -> StoreDirectory:
    """A store's directory, after a look at its manifest. Changes nothing.

    Raises:
        ConfigError: this is no store, or one of another format.
    """
    directory, shown = StoreDirectory(root), shown_name(str(root))
    try:
        found = _manifest_format(directory.manifest)
    except FileNotFoundError:
        problem = "no kvstrata store" if root.exists() else "no such directory"
        raise ConfigError(shown, problem, _ACCEPTED) from None
    except OSError as error:
        raise ConfigError(shown, f"cannot be read: {error.strerror}", _ACCEPTED) from error
    except (BadChunk, ValueError, KeyError, TypeError):
        raise ConfigError(shown, "no kvstrata store", _ACCEPTED) from None
    if found != FORMAT:
        raise ConfigError(
            shown, f"a store of format {shown_name(str(found))}", f"a store of format {FORMAT}"
        )
    return directory


def scan(directory: StoreDirectory) -> Iterator[ScannedFile]:
    """All files of all namespaces and the quarantine; reads names and inodes alone.

    A folder that may not be listed stands for what is in it.

    Raises:
        TierUnavailable: the store itself may not be listed.
    """
    for folder in _entries(directory.namespaces):
        if folder.is_dir(follow_symlinks=False):
            yield from _scan_namespace(folder)
    for entry in _entries(directory.quarantine):
        state = _state(entry)
        if state is not None:
            yield _scanned(entry, state, Role.QUARANTINED, namespace="", owner=state.st_uid)


def _scan_namespace(namespace: os.DirEntry[str]) -> Iterator[ScannedFile]:
    outer = _state(namespace)
    if outer is None:
        return
    for entry in _files_below(namespace):
        state = _state(entry)
        if state is not None:
            role = Role.TEMPORARY if is_temporary(entry.name) else Role.CHUNK
            yield _scanned(entry, state, role, namespace=namespace.name, owner=outer.st_uid)


def _files_below(namespace: os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(namespace.path) as entries:
            folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except PermissionError:
        yield namespace
        return
    except FileNotFoundError:
        return
    for folder in folders:
        try:
            with os.scandir(folder.path) as files:
                yield from files
        except PermissionError:
            yield folder
        except FileNotFoundError:
            continue


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"cannot be listed: {error.strerror}"
        raise TierUnavailable(shown_name(str(folder)), problem) from error


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The inode; None when the file was evicted or renamed meanwhile."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _scanned(
    entry: os.DirEntry[str], state: os.stat_result, role: Role, *, namespace: str, owner: int
) -> ScannedFile:
    return ScannedFile(
        path=entry.path,
        role=role,
        namespace=namespace,
        owner=owner,
        num_bytes=state.st_size,
        used_ns=state.st_atime_ns,
        is_regular=stat.S_ISREG(state.st_mode),
    )


def _manifest_format(path: Path) -> object:
    with opened_unnoticed(path) as fd:
        manifest = json.loads(os.pread(fd, _MANIFEST_BYTES, 0))
    return manifest["kvstrata"]
