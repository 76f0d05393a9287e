"""Digests of files, kept from start to start.

A large model on a slow disk takes long to sample, and every rank samples it. A digest is found
again by the file's path while the file is untouched: inode, size, and the times of its last change,
of which one (ctime) cannot be set back. A file that has changed just now may change again within
the clock's resolution, so its digest is not kept.

Whatever goes wrong here costs a computation, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_REST_NS: Final = 2_000_000_000
"""A file that nobody has touched for so long has times that tell a later change."""


class _Kept(msgspec.Struct, frozen=True):
    stamp: str
    digest: bytes


class DigestCache:
    """A folder with one small file for each file whose digest is known.

    Args:
        folder: made when needed; None: nothing is kept.
        scheme: how digests are computed; those of another are not found.
        clock: the time of day, in nanoseconds.
    """

    def __init__(
        self, folder: Path | None, scheme: str, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._folder = folder
        self._scheme = scheme
        self._clock = clock

    def digest(self, path: Path, compute: Callable[[Path], bytes]) -> bytes:
        """The digest of a file, computed if it is not known."""
        if self._folder is None:
            return compute(path)
        stamp, is_at_rest = self._stamp(path)
        kept = self._folder / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        if (digest := _read(kept, stamp)) is not None:
            return digest
        digest = compute(path)
        if is_at_rest:
            _write(kept, _Kept(stamp, digest))
        return digest

    def _stamp(self, path: Path) -> tuple[str, bool]:
        """What tells a file from its other states, and whether every later change will show."""
        stat = path.stat()
        facts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        is_at_rest = self._clock() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _REST_NS
        return f"{self._scheme} {facts}", is_at_rest


def user_digests(what: str, scheme: str) -> DigestCache:
    """The digests that are kept for this user, of files of one kind."""
    folder = _user_cache_folder()
    return DigestCache(folder and folder / what, scheme)


def _user_cache_folder() -> Path | None:
    """Where this user's programs keep what they can compute again; None: there is no such place."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "kvstrata"
    try:
        return Path.home() / ".cache" / "kvstrata"
    except RuntimeError:
        return None


def _read(kept: Path, stamp: str) -> bytes | None:
    try:
        known = msgspec.json.decode(kept.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return known.digest if known.stamp == stamp else None


def _write(kept: Path, known: _Kept) -> None:
    """As a whole or not at all: ranks write at the same time."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(known))
        part.replace(kept)
