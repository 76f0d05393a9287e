"""A directory as a tier: one file per chunk and rank, shared by whoever uses the directory."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import (
    ChunkCorrupt,
    ClosedError,
    ConfigError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from kvstrata.tiers.chunk_file import (
    PublishedUnsynced,
    read_chunk,
    takes_direct_io,
    write_chunk,
)
from kvstrata.tiers.chunk_format import HEADER_BYTES, BadChunk
from kvstrata.tiers.disk_budget import BudgetSpent, DiskBudget, Limits
from kvstrata.tiers.file_layout import StoreDirectory, parse_file_name
from kvstrata.tiers.janitor import HIGH_SHARE, Janitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.config.schema import FilesystemTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline

_NOTE_S: Final = 60.0
"""Recency is kept to the minute."""
_MOST_NOTED: Final = 65_536
_MOST_EVICTED: Final = 1_000_000
"""Evictions remembered until somebody asks."""
_LONGEST_CLOSE_S: Final = 1.0
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
        self._owner = (namespace, rank)
        self._rank = rank
        self._directory = StoreDirectory(Path(config.path))
        self._directory.prepare()
        self._folder = self._directory.namespace(namespace.fingerprint)
        self._folder_text = str(self._folder)
        limits = Limits(config.quota, config.min_free, config.daily_writes)
        try:
            self._make_folders()
            self._direct = takes_direct_io(f"{self._folder}/00")  # where leftovers are collected
            self._budget = DiskBudget(self._directory.usage, limits)
        except OSError as error:
            raise ConfigError(
                "path", f"{config.path} cannot be used: {error.strerror}", "a writable directory"
            ) from error
        self._evicted: deque[str] = deque(maxlen=_MOST_EVICTED)
        self._janitor = Janitor(self._directory, self._budget, self._evicted.append)
        self._uses = _Uses()
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

    def take_evicted(self) -> list[ChunkKey]:
        """Hand over the chunks of this namespace that made room for others. Never blocks.

        Only what this process's janitor did is known; a chunk is gone when one rank's part is.
        """
        keys = []
        while self._evicted:
            path = Path(self._evicted.popleft())
            named = parse_file_name(path.name)
            if named is not None and path.is_relative_to(self._folder):
                keys.append(named[0])
        return keys

    def close(self) -> None:
        """Stop the janitor and let go of files. Does nothing on successive calls."""
        self._is_closed = True
        self._janitor.close()
        # Closing a file waits for its file system too, and that may hang.
        closing = threading.Thread(target=self._budget.close, name="kvstrata-close", daemon=True)
        closing.start()
        closing.join(_LONGEST_CLOSE_S)

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
            return ChunkCorrupt(self.name, f"{error} ({key.hex()})", [key])
        if isinstance(error, BudgetSpent):
            return TierFull(self.name, str(error), [key])
        kind = TierFull if error.errno in _NO_ROOM else TierUnavailable
        return kind(self.name, error.strerror or str(error), [key])

    def _read(self, chunk: ChunkBuffer) -> None:
        key = chunk.label.key
        path = self._path(key, self._rank.index)
        note_use = self._uses.is_worth_noting(key)
        try:
            read_chunk(path, chunk, self._owner, direct=self._direct, note_use=note_use)
        except BadChunk:
            self._quarantine(path)
            raise
        if note_use:
            self._uses.add(key)

    def _write(self, chunk: ChunkBuffer) -> None:
        key, size = chunk.label.key, HEADER_BYTES + chunk.label.payload_bytes
        path = self._path(key, self._rank.index)
        if _is_there(path, size):
            return
        usage = self._budget.reserve(size)
        if self._budget.is_high(usage, HIGH_SHARE):
            self._janitor.wake()
        try:
            write_chunk(path, chunk, self._owner, direct=self._direct, durability=self._durability)
        except PublishedUnsynced:  # it is there, and stays counted
            raise
        except BaseException as error:
            self._budget.release(size)
            if isinstance(error, FileNotFoundError):  # of the folder: a fault, not a miss
                raise TierUnavailable(self.name, str(error.strerror), [key]) from error
            raise

    def _stat_all_ranks(self, key: ChunkKey) -> None:
        for index in range(self._rank.count):
            os.stat(self._path(key, index))  # noqa: PTH116 - a string is faster

    def _remove(self, key: ChunkKey) -> None:
        path = Path(self._path(key, self._rank.index))
        size = path.stat().st_size
        path.unlink()
        self._budget.release(size)

    def _quarantine(self, path: str) -> None:
        """Move a bad file away, if that is possible; another thread may have been faster."""
        with contextlib.suppress(OSError):
            os.rename(path, self._directory.quarantine / os.path.basename(path))  # noqa: PTH104, PTH119

    def _path(self, key: ChunkKey, rank_index: int) -> str:
        name = key.hex()
        return f"{self._folder_text}/{name[:2]}/{name}.{rank_index}of{self._rank.count}"

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(256):
            (self._folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)


class _Uses:
    """Which chunks were noted as used lately, so that a hot one costs no system call.

    Threads may race: then a use is noted twice.
    """

    def __init__(self) -> None:
        self._noted_at: dict[ChunkKey, float] = {}

    def is_worth_noting(self, key: ChunkKey) -> bool:
        """Whether the last note is old enough for another."""
        noted_at = self._noted_at.get(key)
        return noted_at is None or time.monotonic() >= noted_at + _NOTE_S

    def add(self, key: ChunkKey) -> None:
        """A use was noted."""
        if len(self._noted_at) >= _MOST_NOTED:
            self._noted_at = {}
        self._noted_at[key] = time.monotonic()


def _is_there(path: str, size: int) -> bool:
    """Whether the chunk was written before: equal keys mean equal bytes, so once is enough."""
    if not os.access(path, os.F_OK):  # the usual case, without the price of an exception
        return False
    try:
        return os.stat(path).st_size == size  # noqa: PTH116 - a string is faster
    except FileNotFoundError:
        return False
