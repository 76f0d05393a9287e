"""Bring a directory down to a size, by hand.

The janitor of a running process may be at work in the same directory: its lock is taken if it is
free, and otherwise both delete, which does no harm, since a file is only ever deleted once.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.operations.directory_listing import recount
from kvstrata.operations.directory_scan import Role, ScannedFile, open_directory, scan
from kvstrata.operations.listing import Totals, no_progress, shown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstrata.operations.listing import OnProgress
    from kvstrata.tiers.file_layout import StoreDirectory


@dataclass(frozen=True, slots=True)
class Collection:
    """What was done to a directory."""

    address: str
    quota_bytes: int
    before_bytes: int
    after_bytes: int
    evicted: Totals
    leftovers: Totals
    """Removed, of crashed writers."""
    foreign_bytes: int
    """Of other users, which are counted but never touched."""
    is_alone: bool
    """Whether no other process's janitor was in charge."""
    is_usage_right: bool
    """False: the shared counter could not be corrected."""

    @property
    def has_reached_quota(self) -> bool:
        """Whether no more than the quota is left."""
        return self.after_bytes <= self.quota_bytes


def collect_garbage(
    root: Path, quota_bytes: int, on_progress: OnProgress = no_progress
) -> Collection:
    """Remove leftovers, then what was used longest ago, until no more than the quota is left.

    Raises:
        ConfigError: this is no store.
        TierUnavailable: it cannot be listed.
    """
    directory = open_directory(root)
    with _janitor_lock(directory) as is_alone:
        files = list(scan(directory))
        before = _sum_bytes(files)
        try:
            leftovers = Totals.of(f.num_bytes for f in files if may_clean(f) and _delete(f))
            excess = before - leftovers.num_bytes - quota_bytes
            evicted = _evict(eviction_order(files), excess, on_progress)
        finally:
            # Counted anew: others wrote and deleted meanwhile.
            left, is_usage_right = recount(directory)
    return Collection(
        address=shown_name(str(root)),
        quota_bytes=quota_bytes,
        before_bytes=before,
        after_bytes=_sum_bytes(left),
        evicted=evicted,
        leftovers=leftovers,
        foreign_bytes=_sum_bytes(file for file in left if not _is_ours(file)),
        is_alone=is_alone,
        is_usage_right=is_usage_right,
    )


def eviction_order(files: Iterable[ScannedFile]) -> list[ScannedFile]:
    """What may be evicted, first to last: the quarantine, then by last use."""
    may_go = [file for file in files if _is_deletable(file) and file.role is not Role.TEMPORARY]
    return sorted(may_go, key=lambda f: (f.role is not Role.QUARANTINED, f.used_ns, f.path))


def may_clean(file: ScannedFile) -> bool:
    """Whether it is a crashed writer's, and ours."""
    return _is_deletable(file) and file.is_leftover


def _is_ours(file: ScannedFile) -> bool:
    return file.owner == os.geteuid()


def _is_deletable(file: ScannedFile) -> bool:
    # Links and pipes are nobody's chunks: verify names them, an operator decides.
    return file.is_regular and _is_ours(file)


def _evict(order: Iterable[ScannedFile], excess: int, on_progress: OnProgress) -> Totals:
    sizes: list[int] = []
    freed = 0
    for file in order:
        if freed >= excess:
            break
        if _delete(file):
            sizes.append(file.num_bytes)
            freed += file.num_bytes
            on_progress(freed, excess)
        elif not Path(file.path).exists():
            freed += file.num_bytes  # another process was faster
    return Totals.of(sizes)


def _delete(file: ScannedFile) -> bool:
    """Whether this call deleted it."""
    try:
        Path(file.path).unlink()
    except OSError:
        return False
    return True


def _sum_bytes(files: Iterable[ScannedFile]) -> int:
    return sum(file.num_bytes for file in files)


@contextmanager
def _janitor_lock(directory: StoreDirectory) -> Iterator[bool]:
    """Keep janitors away meanwhile; yields False when one is at work already.

    The file is not made if missing: a root's file would keep the store's own user out.
    """
    try:
        fd = os.open(directory.janitor_lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        yield _is_free(fd)
    finally:
        os.close(fd)


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
