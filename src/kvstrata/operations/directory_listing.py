"""A directory as operators see it."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.operations.directory_scan import Role, open_directory, scan
from kvstrata.operations.listing import (
    Housekeeping,
    Place,
    Totals,
    UsageCount,
    chunk_at,
    shown_name,
)
from kvstrata.operations.unnoticed import opened_unnoticed, read_pieces
from kvstrata.tiers.disk_budget import DiskBudget, Limits
from kvstrata.tiers.file_layout import FORMAT

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from kvstrata.operations.directory_scan import ScannedFile
    from kvstrata.tiers.file_layout import StoreDirectory


class DirectoryListing:
    """A `StoreListing` over a directory.

    Raises:
        ConfigError: this is no store.
    """

    def __init__(self, root: Path) -> None:
        self._directory = open_directory(root)
        self._root = root

    @property
    def address(self) -> str:
        """The path."""
        return shown_name(str(self._root))

    @property
    def medium(self) -> str:
        """The format that the manifest names."""
        return f"directory, format {FORMAT}"

    def places(self) -> Iterator[Place]:
        """Every file in the namespaces, files being written left out. Changes nothing.

        Raises:
            TierUnavailable: the store cannot be listed.
        """
        for file in scan(self._directory):
            if file.role is Role.CHUNK:
                yield self._place(file)

    def read(self, place: Place, most_bytes: int | None = None) -> Generator[memoryview]:
        """The file's bytes; its access time stays.

        Raises:
            FileNotFoundError: it was evicted meanwhile.
            BadChunk: it is no regular file.
            OSError: it cannot be read.
        """
        with opened_unnoticed(self._root / place.name) as fd:
            yield from read_pieces(fd, most_bytes)

    def quarantine(self, place: Place) -> str:
        """Move the file into the quarantine folder.

        Raises:
            FileNotFoundError: it was evicted meanwhile.
            OSError: it cannot be moved.
        """
        source = self._root / place.name
        if not source.is_symlink() and source.is_dir():  # nobody could evict it from there
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _make_quarantine(self._directory)
        target = self._directory.quarantine / source.name
        source.replace(target)
        return str(target.relative_to(self._root))

    def housekeeping(self) -> Housekeeping:
        """Files being written or set aside, and the counter. Changes nothing."""
        files = list(scan(self._directory))
        temporary = [file for file in files if file.role is Role.TEMPORARY]
        return Housekeeping(
            temporary=Totals.of(file.num_bytes for file in temporary),
            leftovers=Totals.of(file.num_bytes for file in temporary if file.is_leftover),
            quarantined=Totals.of(f.num_bytes for f in files if f.role is Role.QUARANTINED),
            usage=usage_count(self._directory, files),
        )

    def correct_usage(self) -> bool:
        """Set the counter to what is there; False: it cannot be written."""
        return recount(self._directory).is_usage_right

    def close(self) -> None:
        """Nothing is held open."""

    def _place(self, file: ScannedFile) -> Place:
        path = Path(file.path)
        return Place(
            name=str(path.relative_to(self._root)),
            namespace=file.namespace,
            chunk=chunk_at(path.parent.name, path.name),
            num_bytes=file.num_bytes,
            used_ns=file.used_ns,
        )


def usage_count(directory: StoreDirectory, files: Iterable[ScannedFile]) -> UsageCount | None:
    """The counter against a scan; None: there is none, or it may not be read."""
    try:
        owner = directory.usage.stat().st_uid
        budget = DiskBudget(directory.usage, Limits())
    except OSError:
        return None
    with closing(budget):
        return UsageCount(budget.usage().used_bytes, _counted_bytes(files, owner))


class Recount(NamedTuple):
    """A scan after which the counter was set."""

    files: list[ScannedFile]
    is_usage_right: bool
    """False: the counter cannot be written."""


def recount(directory: StoreDirectory) -> Recount:
    """Scan, and set the counter to what was found.

    No counter is made: a root's file would keep the store's own user out, who makes one when
    needed.

    Raises:
        TierUnavailable: the store cannot be listed.
    """
    try:
        owner = directory.usage.stat().st_uid
        budget = DiskBudget(directory.usage, Limits())
    except OSError as error:
        return Recount(list(scan(directory)), isinstance(error, FileNotFoundError))
    with closing(budget):
        before = budget.usage()  # what is reserved from here on is not in the scan
        files = list(scan(directory))
        budget.correct(_counted_bytes(files, owner), before)
    return Recount(files, is_usage_right=True)


def _counted_bytes(files: Iterable[ScannedFile], owner: int) -> int:
    """What the janitor of the counter's owner would count: its namespaces and the quarantine."""
    return sum(
        file.num_bytes for file in files if file.role is Role.QUARANTINED or file.owner == owner
    )


def _make_quarantine(directory: StoreDirectory) -> None:
    """Make the folder if somebody removed it, for the store's owner whoever is calling."""
    if directory.quarantine.is_dir():
        return
    directory.quarantine.mkdir(mode=0o700, exist_ok=True)
    state = directory.root.stat()
    if state.st_uid != os.geteuid():
        os.chown(directory.quarantine, state.st_uid, state.st_gid)
