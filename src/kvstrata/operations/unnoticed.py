"""Reading files so that nobody can tell: their access times are the store's memory of last uses."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstrata.tiers.chunk_format import HEADER_BYTES, BadChunk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NO_ACCESS_TIME: Final = getattr(os, "O_NOATIME", 0)
# A link could lead out of the store, and opening a pipe would wait for its writer.
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE_BYTES: Final = 2**20


@contextmanager
def opened_unnoticed(path: Path) -> Iterator[int]:
    """A regular file's descriptor; its access time is the same afterwards, where that is allowed.

    Raises:
        BadChunk: it is no regular file.
        OSError: it cannot be opened.
    """
    fd, is_silent = _open(path)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise BadChunk("no regular file")
        try:
            yield fd
        finally:
            if not is_silent:
                _restore(fd, before)
    finally:
        os.close(fd)


def read_pieces(fd: int, most_bytes: int | None) -> Iterator[memoryview]:
    """A file's bytes in order: one header page, then larger pieces, in memory that is reused."""
    buffer, offset = memoryview(bytearray(_PIECE_BYTES)), 0
    while most_bytes is None or offset < most_bytes:
        wanted = buffer[: _PIECE_BYTES if offset else HEADER_BYTES]
        count = _fill(fd, wanted, offset)
        if count == 0:
            return
        yield wanted[:count]
        offset += count


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read until the view is full or the file ends; return how much there was."""
    count = 0
    while count < view.nbytes:
        step = os.preadv(fd, [view[count:]], offset + count)
        if step == 0:
            break
        count += step
    return count


def _open(path: Path) -> tuple[int, bool]:
    """The descriptor, and whether reading from it leaves the access time alone."""
    try:
        return os.open(path, _FLAGS | _NO_ACCESS_TIME), bool(_NO_ACCESS_TIME)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadChunk("a link, no regular file") from error
        if error.errno != errno.EPERM:
            raise
    return os.open(path, _FLAGS), False  # another user's file: only its owner may read silently


def _restore(fd: int, before: os.stat_result) -> None:
    if os.fstat(fd).st_atime_ns == before.st_atime_ns:
        return
    try:
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    except PermissionError:
        return  # another user's file: the system notes the reading, and there is no way around
