"""A directory as a tier: one file per chunk and rank, shared by whoever uses the directory."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.core.chunk_label import Rank
from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import (
    ChunkCorrupt,
    ClosedError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from kvstrata.tiers.chunk_file import NewChunkFile, read_chunk, takes_direct_io
from kvstrata.tiers.chunk_format import HEADER_BYTES, BadChunk
from kvstrata.tiers.disk_budget import BudgetSpent, DiskBudget, Limits
from kvstrata.tiers.file_layout import StoreDirectory, file_name
from kvstrata.tiers.janitor import Janitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.config.schema import FilesystemTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class FilesystemStore:
    """One rank's chunks of one namespace in a directory.

    Calls run on the caller's thread and block as long as the file system does; deadlines are
    checked between chunks. Threads may call at the same time.

    Args:
        config: the tier's settings.
        namespace: whose chunks.
        rank: whose part of them.

    Raises:
        ConfigError: the directory cannot be used, or holds something else.
    """

    def __init__(self, config: FilesystemTierConfig, namespace: Namespace, rank: Rank) -> None:
        self.name = config.name or "filesystem"
        self._durability = config.durability
        self._namespace = namespace
        self._rank = rank
        self._directory = StoreDirectory(Path(config.path))
        self._directory.prepare()
        self._folder = self._directory.namespace(namespace.fingerprint)
        self._make_folders()
        self._direct = takes_direct_io(self._folder / "00")  # where leftovers are collected
        limits = Limits(config.quota, config.min_free, config.daily_writes)
        self._budget = DiskBudget(self._directory.usage, limits)
        self._janitor = Janitor(self._directory, self._budget)
        self._is_closed = False

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Fill the buffers; what fails a check goes into quarantine."""
        by_key = {chunk.label.key: chunk for chunk in chunks}
        return self._each(by_key, deadline, lambda key: self._read(by_key[key]))

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Keep the payloads, within the limits."""
        by_key = {chunk.label.key: chunk for chunk in chunks}
        return self._each(by_key, deadline, lambda key: self._write(by_key[key]))

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Look for every rank's file."""
        return self._each(keys, deadline, self._stat_all_ranks)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Delete this rank's files."""
        return self._each(keys, deadline, self._remove)

    def close(self) -> None:
        """Stop the janitor and let go of files. Does nothing on successive calls."""
        self._is_closed = True
        self._janitor.close()
        self._budget.close()

    def _each(
        self, keys: Iterable[ChunkKey], deadline: Deadline, act: Callable[[ChunkKey], None]
    ) -> TierOutcome:
        """Do one thing for each key, and turn exceptions into facts about it."""
        if self._is_closed:
            raise ClosedError(f"tier {self.name} is closed")
        done: set[ChunkKey] = set()
        absent: set[ChunkKey] = set()
        failed: dict[ChunkKey, TierError] = {}
        for key in keys:
            try:
                if time.monotonic() > deadline:
                    raise TierTimeout(self.name, "the deadline passed", [key])
                act(key)
                done.add(key)
            except FileNotFoundError:
                absent.add(key)
            except TierError as error:
                failed[key] = error
            except (BadChunk, BudgetSpent, OSError) as error:
                failed[key] = self._fault(key, error)
        return TierOutcome(frozenset(done), frozenset(absent), failed)

    def _fault(self, key: ChunkKey, error: BadChunk | BudgetSpent | OSError) -> TierError:
        if isinstance(error, BadChunk):
            return ChunkCorrupt(self.name, f"{error} ({self._path(key).name})", [key])
        if isinstance(error, BudgetSpent):
            return TierFull(self.name, str(error), [key])
        kind = TierFull if error.errno in _NO_ROOM else TierUnavailable
        return kind(self.name, error.strerror or str(error), [key])

    def _read(self, chunk: ChunkBuffer) -> None:
        path = self._path(chunk.label.key)
        try:
            read_chunk(path, chunk, (self._namespace, self._rank), direct=self._direct)
        except BadChunk:
            self._quarantine(path)
            raise

    def _write(self, chunk: ChunkBuffer) -> None:
        path, size = self._path(chunk.label.key), HEADER_BYTES + chunk.label.payload_bytes
        if _is_there(path, size):
            return
        try:
            with NewChunkFile(path, chunk, direct=self._direct) as file:
                self._budget.reserve(size)  # behind the file: a scan sees it or the reservation
                self._fill(file, size)
        except FileNotFoundError as error:  # the folder went away: a fault, not a miss
            raise TierUnavailable(self.name, str(error.strerror), [chunk.label.key]) from error
        finally:
            self._janitor.wake_if_needed()

    def _fill(self, file: NewChunkFile, size: int) -> None:
        try:
            file.fill(self._namespace, self._rank)
            file.publish(self._durability)
        except OSError:
            self._budget.release(size)
            raise

    def _stat_all_ranks(self, key: ChunkKey) -> None:
        for index in range(self._rank.count):
            self._path(key, Rank(index, self._rank.count)).stat()

    def _remove(self, key: ChunkKey) -> None:
        path = self._path(key)
        size = path.stat().st_size
        path.unlink()
        self._budget.release(size)

    def _quarantine(self, path: Path) -> None:
        """Move a bad file away; another thread may have been faster."""
        try:
            path.replace(self._directory.quarantine / path.name)
        except FileNotFoundError:
            return

    def _path(self, key: ChunkKey, rank: Rank | None = None) -> Path:
        return self._folder / key.hex()[:2] / file_name(key, rank or self._rank)

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(256):
            (self._folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)


def _is_there(path: Path, size: int) -> bool:
    """Whether the chunk was written before: equal keys mean equal bytes, so once is enough."""
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
