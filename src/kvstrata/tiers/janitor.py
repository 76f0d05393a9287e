"""The one process that keeps a directory within its limits.

Every process that opens a store runs a janitor; a file lock elects the one that works. It wakes
when usage nears the limits, lists all files without reading them, and deletes what was used
longest ago. It also removes what crashed writers left, and puts the shared count right.

Ownership: the thread owns nothing that others read; `_wake` and `_stop` are events.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.tiers.file_layout import chunk_files, is_leftover, is_temporary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstrata.tiers.disk_budget import DiskBudget
    from kvstrata.tiers.file_layout import StoreDirectory

_log = logging.getLogger(__name__)

HIGH_SHARE: Final = 0.95
"""Eviction starts when this share of a limit is in use."""
LOW_SHARE: Final = 0.90
"""Eviction stops at this share."""
_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_RECOUNT_S: Final = 600.0
"""How often leftovers are looked for when nothing else calls for it."""


class StoredFile(NamedTuple):
    """One file; sorted by last use."""

    used_ns: int
    size: int
    path: str
    name: str


class Janitor:
    """Keeps a directory within its limits, in the background.

    Args:
        directory: the store.
        budget: its shared counters and limits.
        on_evicted: told the path of every file that is deleted to make room, on this thread.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        budget: DiskBudget,
        on_evicted: Callable[[str], None] | None = None,
    ) -> None:
        self._directory = directory
        self._budget = budget
        self._on_evicted = on_evicted
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-janitor", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the janitor look now. Never blocks."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread. Does nothing on successive calls."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        """Wait to be elected, then serve; a fault of the file system never ends the thread."""
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                path = self._directory.janitor_lock
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._serve()
                finally:
                    os.close(fd)
            self._stop.wait(_PAUSE_S)

    def _serve(self) -> None:
        """Count now and then, when nobody writes; evict whenever it is needed."""
        recount_at, pause_s = 0.0, _PAUSE_S
        while not self._stop.is_set():
            if time.monotonic() >= recount_at:
                is_counted = self._guarded(self._recount)
                pause_s = _RECOUNT_S if is_counted else min(2 * pause_s, _LONGEST_PAUSE_S)
                recount_at = time.monotonic() + pause_s
            self._guarded(self._evict_if_needed)
            self._wake.wait(_PAUSE_S)
            self._wake.clear()

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """Do one round; a fault of the file system ends the round, not the janitor."""
        try:
            return work()
        except OSError as error:
            _log.warning("janitor of %s: %s", self._directory.root, error)
            self._stop.wait(_PAUSE_S)
            return False

    def _recount(self) -> bool:
        before = self._budget.usage()
        return self._budget.correct_if_quiet(collect(self._directory), before)

    def _evict_if_needed(self) -> bool:
        if not self._budget.excess_bytes(HIGH_SHARE):
            return False
        return evict(self._directory, self._budget, LOW_SHARE, self._on_evicted) > 0


def collect(directory: StoreDirectory) -> int:
    """Remove what crashed writers left; return the bytes of what remains."""
    return sum(file.size for file in stored_files(directory) if not _is_collected(file))


def evict(
    directory: StoreDirectory,
    budget: DiskBudget,
    share: float,
    on_evicted: Callable[[str], None] | None = None,
) -> int:
    """Delete what was used longest ago until `share` of the limits is kept; return the count.

    Leftovers and quarantined files go first; a file that cannot be deleted is passed over. Counts
    what is there on the way, so the shared count is right afterwards.
    """
    before = budget.usage()
    files = sorted(file for file in stored_files(directory) if not _is_collected(file))
    quarantined = [f for f in files if f.path.startswith(str(directory.quarantine))]
    budget.correct(sum(file.size for file in files), before)
    excess = budget.excess_bytes(share)
    count = 0
    for file in [*quarantined, *files]:
        if excess <= 0:
            break
        if not is_temporary(file.name) and _unlink(file.path):
            budget.release(file.size)
            if on_evicted:
                on_evicted(file.path)
            excess -= file.size
            count += 1
    return count


def stored_files(directory: StoreDirectory) -> Iterator[StoredFile]:
    """Every file of the namespaces that are ours, and of the quarantine, with size and last use."""
    owner = os.geteuid()
    ours = [f for f in sorted(directory.namespaces.iterdir()) if f.stat().st_uid == owner]
    entries = (chunk_files(folder) for folder in ours)
    for entry in itertools.chain(os.scandir(directory.quarantine), *entries):
        try:
            state = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # evicted or renamed meanwhile
        if not stat.S_ISREG(state.st_mode):
            continue  # somebody else's folder or link
        yield StoredFile(state.st_atime_ns, state.st_size, entry.path, entry.name)


def _is_collected(file: StoredFile) -> bool:
    """Remove a file if a crashed writer left it; whether it did."""
    is_left = is_temporary(file.name) and is_leftover(file.path, file.used_ns)
    return is_left and _unlink(file.path)


def _unlink(path: str) -> bool:
    """Delete a file; whether it is this call that did."""
    try:
        Path(path).unlink()
    except OSError:
        return False
    return True
