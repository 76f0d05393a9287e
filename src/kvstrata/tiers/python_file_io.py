"""`kvstrata.tiers.file_io.FileCalls` in Python, for where the native calls were not built.

Payloads move between file and memory without a copy: header and parts go through one vectored
call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import operator
import os
import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

from kvstrata.core.spans import ceil_to
from kvstrata.tiers.chunk_format import checksum, seal_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PAGE_BYTES: Final = 4096
_MOST_PARTS: Final = 1024  # IOV_MAX on Linux
_COUNTER: Final = "q"
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_scratch: Final = threading.local()


def add(fd: int, change: bytes, /) -> bytes:
    """See `FileCalls`."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        found = os.pread(fd, len(change), 0)
        counters = array(_COUNTER, found if len(found) == len(change) else bytes(len(change)))
        sums = array(_COUNTER, map(operator.add, counters, array(_COUNTER, change))).tobytes()
        os.pwrite(fd, sums, 0)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return sums


def read(
    path: str,
    header: mmap.mmap,
    parts: tuple[memoryview, ...],
    /,
    *,
    num_bytes: int,
    direct: bool,
    note_use: bool,
) -> tuple[int, bytes]:
    """See `FileCalls`."""
    views = _pages(header, parts, num_bytes)
    flags = _DIRECT if direct and _are_aligned(views) else 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        count = _read_until(fd, [*views, memoryview(_spare_page())], num_bytes)
        if count != num_bytes:
            return count, b""
        digest = checksum(_front(parts, num_bytes - len(header)))
        if note_use:
            _note_use(fd)
        return count, digest
    finally:
        os.close(fd)


def write(  # noqa: PLR0913 - as the protocol has it
    temporary: str,
    path: str,
    header: mmap.mmap,
    parts: tuple[memoryview, ...],
    /,
    *,
    num_bytes: int,
    direct: bool,
    sync: bool,
) -> int:
    """See `FileCalls`."""
    seal_header(header, checksum(_front(parts, num_bytes - len(header))))
    views = _pages(header, parts, num_bytes)
    direct = direct and _are_aligned(views)
    if not direct:
        views = _front(views, num_bytes)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(temporary, flags | (_DIRECT if direct else 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells that its writer lives
        _write_fully(fd, views)
        if direct and num_bytes % _PAGE_BYTES:
            os.ftruncate(fd, num_bytes)
        if sync:
            os.fdatasync(fd)
        os.rename(temporary, path)  # noqa: PTH104 - a string is faster
    except BaseException:
        _close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    return _close(fd)


def _close(fd: int) -> int:
    """Close a file; the number of the error, 0 for none."""
    try:
        os.close(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _note_use(fd: int) -> None:
    """Recency is the access time, set by hand: few mounts keep it, and nothing is rewritten."""
    with contextlib.suppress(OSError):  # a read-only mount still serves chunks
        os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))


def _write_fully(fd: int, views: Sequence[memoryview]) -> None:
    offset = 0
    while views:
        written = os.pwritev(fd, views[:_MOST_PARTS], offset)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        views = _after(views, written)


def _read_until(fd: int, views: Sequence[memoryview], num_bytes: int) -> int:
    """Read so many bytes or more, or up to the file's end; how many."""
    offset = 0
    while offset < num_bytes:
        count = os.preadv(fd, views[:_MOST_PARTS], offset)
        if count == 0:
            break
        offset += count
        views = _after(views, count)
    return offset


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the views behind their first `count` bytes."""
    left: list[memoryview] = []
    for view in views:
        skipped = min(count, view.nbytes)
        count -= skipped
        if skipped < view.nbytes:
            left.append(view[skipped:])
    return left


def _front(views: Iterable[memoryview], count: int) -> list[memoryview]:
    """The views' first `count` bytes, or all there are."""
    front: list[memoryview] = []
    for view in views:
        kept = min(count, view.nbytes)
        count -= kept
        if kept:
            front.append(view[:kept])
    return front


def _pages(header: mmap.mmap, parts: tuple[memoryview, ...], num_bytes: int) -> list[memoryview]:
    """Header and parts as far as the payload's last page."""
    return _front((memoryview(header), *parts), ceil_to(num_bytes, _PAGE_BYTES))


def _are_aligned(views: Iterable[memoryview]) -> bool:
    """Whether every view starts and ends on a page, as direct I/O needs it."""
    return all(
        not view.readonly and view.nbytes % _PAGE_BYTES == 0 and _address(view) % _PAGE_BYTES == 0
        for view in views
    )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _spare_page() -> mmap.mmap:
    """This thread's page for bytes that should not be there."""
    page: mmap.mmap | None = getattr(_scratch, "page", None)
    if page is None:
        page = _scratch.page = mmap.mmap(-1, _PAGE_BYTES)
    return page
