"""How much may still be written: one count for all processes that share a directory.

The counters lie in a small file and change under a lock that all processes take. A writer that
dies between reserving and writing leaves a reservation behind; the janitor's next scan puts the
count right. Writers are refused, never delayed: a store that does not fit is dropped.

Ownership: the file belongs to everyone under its lock. A lock belongs to the open file, which this
process's threads share, so `_mutex` orders them. `_free` is a guess, and `_day` the day that was
seen to begin; threads may refresh them at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstrata.config.units import ByteSize
from kvstrata.tiers import file_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

_COUNTERS: Final = struct.Struct("<qqqqq")
_DAY_S: Final = 86_400
_LOCK_S: Final = 2.0
"""Longest wait for the counters; whoever holds them longer is hung."""
_FREE_S: Final = 0.1
"""How long a look at the file system's free room is good for."""


class BudgetSpent(Exception):  # noqa: N818 - becomes TierFull at the tier's edge
    """A write would break a limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a directory may cost; None: no limit."""

    quota_bytes: int | None = None
    min_free_bytes: int = 0
    daily_bytes: int | None = None


class Usage(NamedTuple):
    """The shared counters."""

    used_bytes: int = 0
    reserved_bytes: int = 0
    """Ever reserved; tells what was reserved since an earlier look."""
    released_bytes: int = 0
    """Ever released."""
    day: int = 0
    written_bytes: int = 0
    """On that day."""


class _Free(NamedTuple):
    """A look at the file system."""

    seen_at: float
    num_bytes: int


class DiskBudget:
    """Reserves room before each write.

    Args:
        path: the counters' file; made if missing.
        limits: this process's view of what is allowed.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._limits = limits
        self._folder = path.parent
        self._mutex = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._free = _Free(float("-inf"), 0)
        self._day = 0

    @property
    def limits(self) -> Limits:
        """What is allowed."""
        return self._limits

    def usage(self) -> Usage:
        """The counters now.

        Raises:
            OSError: they cannot be read.
        """
        with self._locked():
            return self._load()

    def reserve(self, num_bytes: int) -> Usage:
        """Count bytes about to be written; the counters afterwards.

        They are counted, checked, and taken back if they were too many: one call when they are
        not. Meanwhile others may be refused what would just have fitted.

        Raises:
            BudgetSpent: says which limit they would break; nothing stays counted.
            OSError: the counters cannot be changed.
        """
        self._begin_day()
        free = self._free_bytes() - num_bytes
        usage = self._add(Usage(num_bytes, num_bytes, 0, 0, num_bytes))
        try:
            self._check(usage, free)
        except BudgetSpent:
            self._add(Usage(-num_bytes, -num_bytes, 0, 0, -num_bytes))
            raise
        self._free = _Free(self._free.seen_at, self._free.num_bytes - num_bytes)
        return usage

    def release(self, num_bytes: int) -> None:
        """Bytes were removed, or a reserved write did not happen.

        Raises:
            OSError: the counters cannot be changed.
        """
        with self._locked():
            usage = self._load()
            used, released = usage.used_bytes - num_bytes, usage.released_bytes + num_bytes
            self._save(usage._replace(used_bytes=max(0, used), released_bytes=released))

    def correct(self, found_bytes: int, before: Usage) -> None:
        """Set the count to what a scan found, plus what was reserved since it began.

        What is written or removed while a scan runs may be counted once too often until the next
        scan, never too seldom; except for one chunk per writer that had reserved and not begun, or
        was about to be refused.

        Raises:
            OSError: the counters cannot be changed.
        """
        with self._locked():
            usage = self._load()
            since = usage.reserved_bytes - before.reserved_bytes
            self._save(usage._replace(used_bytes=found_bytes + since))

    def correct_if_quiet(self, found_bytes: int, before: Usage) -> bool:
        """Set the count to what a scan found, unless something changed meanwhile; whether it was.

        Raises:
            OSError: the counters cannot be changed.
        """
        with self._locked():
            usage = self._load()
            is_quiet = (usage.reserved_bytes, usage.released_bytes) == (
                before.reserved_bytes,
                before.released_bytes,
            )
            if is_quiet:
                self._save(usage._replace(used_bytes=found_bytes))
            return is_quiet

    def is_high(self, usage: Usage, share: float) -> bool:
        """Whether more than a share of the limits is in use, by what is known already."""
        quota, min_free = self._limits.quota_bytes, self._limits.min_free_bytes
        is_over = quota is not None and usage.used_bytes > quota * share
        return is_over or self._free.num_bytes < min_free * (2 - share)

    def excess_bytes(self, share: float) -> int:
        """Bytes to free until no more than `share` of the limits is in use.

        Raises:
            OSError: the counters or the file system cannot be read.
        """
        excess = 0
        if self._limits.quota_bytes is not None:
            excess = self.usage().used_bytes - int(self._limits.quota_bytes * share)
        wanted_free = int(self._limits.min_free_bytes * (2 - share))
        return max(0, excess, wanted_free - self._free_bytes())

    def close(self) -> None:
        """Let go of the file. Does nothing on successive calls."""
        with self._mutex:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                with suppress(OSError):  # of a file system that is gone; it is freed all the same
                    os.close(fd)

    def _check(self, usage: Usage, free: int) -> None:
        limits = self._limits
        if limits.quota_bytes is not None and usage.used_bytes > limits.quota_bytes:
            raise BudgetSpent(f"the quota of {ByteSize(limits.quota_bytes)} is used up")
        if free < limits.min_free_bytes:
            raise BudgetSpent(f"less than {ByteSize(limits.min_free_bytes)} would be left free")
        if limits.daily_bytes is not None and usage.written_bytes > limits.daily_bytes:
            raise BudgetSpent(f"{ByteSize(limits.daily_bytes)} have been written today")

    def _free_bytes(self) -> int:
        now = time.monotonic()
        if now > self._free.seen_at + _FREE_S:
            state = os.statvfs(self._folder)
            self._free = _Free(now, state.f_bavail * state.f_frsize)
        return self._free.num_bytes

    def _begin_day(self) -> None:
        """Set what was written to nothing, if nobody has done so today."""
        day = int(time.time()) // _DAY_S
        if day == self._day:
            return
        with self._locked():
            usage = self._load()
            if usage.day != day:
                self._save(usage._replace(day=day, written_bytes=0))
        self._day = day

    def _add(self, change: Usage) -> Usage:
        """Change the counters in one call; what they are then."""
        data = _COUNTERS.pack(*change)
        with self._mutex:
            sums = self._patiently(lambda: file_io.calls.add(self._fd, data))
        return Usage._make(_COUNTERS.unpack(sums))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            self._patiently(lambda: fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Do what needs the file's lock, but do not wait for a holder that hangs."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the store is closed")
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                return call()
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(errno.ETIMEDOUT, "the counters stayed locked") from None
                time.sleep(0.0005)

    def _load(self) -> Usage:
        data = os.pread(self._fd, _COUNTERS.size, 0)
        return Usage._make(_COUNTERS.unpack(data)) if len(data) == _COUNTERS.size else Usage()

    def _save(self, usage: Usage) -> None:
        os.pwrite(self._fd, _COUNTERS.pack(*usage), 0)
