"""One chunk as one file: written aside, synced, renamed; read and checked as a whole.

Payloads move between file and buffer without a copy in this process: header and parts go through
one vectored call. Direct I/O is used where the file system takes it and the parts lie on pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kvstrata.core.spans import ceil_to
from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    BadChunk,
    check_header,
    check_payload,
    make_header,
    parse_header,
)
from kvstrata.tiers.file_layout import temporary_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.config.schema import Durability
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank

PAGE_BYTES: Final = 4096
_MOST_PARTS: Final = 1024  # IOV_MAX on Linux
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_scratch: Final = threading.local()


class NewChunkFile:
    """A chunk's file while it is written: its name leads to the whole of it or to nothing.

    Leaving the context without `publish` removes the temporary file.

    Args:
        path: where the chunk will be found.
        chunk: what is written.
        direct: whether to go past the page cache, if the parts allow it.

    Raises:
        OSError: as the file system says.
    """

    def __init__(self, path: str, chunk: ChunkBuffer, *, direct: bool) -> None:
        self._path = path
        self._chunk = chunk
        self._direct = direct and _is_aligned(chunk)
        self._is_published = False
        self._temporary = temporary_path(os.path.dirname(path))  # noqa: PTH120 - a string is faster
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags | (_DIRECT if self._direct else 0), 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells that its writer lives
        except OSError:
            self.__exit__()
            raise

    @property
    def is_published(self) -> bool:
        """Whether the file has its name."""
        return self._is_published

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)
        if not self._is_published:
            Path(self._temporary).unlink(missing_ok=True)

    def fill(self, namespace: Namespace, rank: Rank) -> None:
        """Write header and payload.

        Raises:
            OSError: as the file system says.
        """
        chunk, header = self._chunk, _header_page()
        header[:] = make_header(chunk.label, namespace, rank, chunk.payload())
        payload = _whole_pages(chunk) if self._direct else chunk.payload()
        _write_fully(self._fd, [memoryview(header), *payload])
        size = HEADER_BYTES + chunk.label.payload_bytes
        if self._direct and size % PAGE_BYTES:
            os.ftruncate(self._fd, size)

    def publish(self, durability: Durability) -> None:
        """Give the file its name, after syncing as much as asked for.

        Raises:
            OSError: as the file system says.
        """
        if durability != "none":
            os.fdatasync(self._fd)
        os.rename(self._temporary, self._path)  # noqa: PTH104 - a string is faster
        self._is_published = True
        if durability == "full":
            _sync_folder(os.path.dirname(self._path))  # noqa: PTH120


def read_chunk(
    path: str, chunk: ChunkBuffer, owner: tuple[Namespace, Rank], *, direct: bool
) -> int:
    """Fill a buffer from a file and check everything; returns the open file, for `note_use`.

    Raises:
        FileNotFoundError: there is no such chunk.
        OSError: as the file system says.
        BadChunk: the file is not the chunk that was asked for.
    """
    header, pages = _header_page(), _whole_pages(chunk)
    direct = direct and _are_aligned(pages)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if direct else 0))
    try:
        views = [memoryview(header), *pages, memoryview(_spare_page())]
        _read_exactly(fd, views, HEADER_BYTES + chunk.label.payload_bytes)
        found = parse_header(memoryview(header))
        check_header(found, chunk.label, *owner)
        check_payload(found, chunk.payload())
    except BaseException:
        os.close(fd)
        raise
    return fd


def note_use(fd: int) -> None:
    """Recency is the access time, set by hand: few mounts keep it, and nothing is rewritten."""
    with contextlib.suppress(OSError):  # a read-only mount still serves chunks
        os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))


def takes_direct_io(folder: str) -> bool:
    """Whether files in this folder can be written past the page cache."""
    if not _DIRECT:
        return False
    path = temporary_path(folder)
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | _DIRECT, 0o600)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only mount refuses this as well
            Path(path).unlink(missing_ok=True)
        return False
    try:
        return os.pwrite(fd, _header_page(), 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        Path(path).unlink(missing_ok=True)


def _write_fully(fd: int, views: Sequence[memoryview]) -> None:
    offset = 0
    while views:
        written = os.pwritev(fd, views[:_MOST_PARTS], offset)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        views = _after(views, written)


def _read_exactly(fd: int, views: Sequence[memoryview], size: int) -> None:
    """Read a file of exactly `size` bytes; the views have room for more, to notice it."""
    offset = 0
    while count := os.preadv(fd, views[:_MOST_PARTS], offset):
        offset += count
        if offset >= size:
            break
        views = _after(views, count)
    if offset != size:
        raise BadChunk(
            f"file of {'more than ' * (offset > size)}{min(offset, size)} bytes, expected {size}"
        )


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the views behind their first `count` bytes."""
    left: list[memoryview] = []
    for view in views:
        skipped = min(count, view.nbytes)
        count -= skipped
        if skipped < view.nbytes:
            left.append(view[skipped:])
    return left


def _whole_pages(chunk: ChunkBuffer) -> list[memoryview]:
    """The parts as far as the payload's last page."""
    return chunk.front(ceil_to(chunk.label.payload_bytes, PAGE_BYTES))


def _is_aligned(chunk: ChunkBuffer) -> bool:
    """Whether every part starts and ends on a page, up to the payload's last one."""
    return _are_aligned(_whole_pages(chunk))


def _are_aligned(pages: Sequence[memoryview]) -> bool:
    return all(
        not view.readonly and view.nbytes % PAGE_BYTES == 0 and _address(view) % PAGE_BYTES == 0
        for view in pages
    )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _header_page() -> mmap.mmap:
    """This thread's page for headers: aligned, and reused."""
    return _pages()[0]


def _spare_page() -> mmap.mmap:
    """This thread's page for bytes that should not be there."""
    return _pages()[1]


def _pages() -> tuple[mmap.mmap, mmap.mmap]:
    pages: tuple[mmap.mmap, mmap.mmap] | None = getattr(_scratch, "pages", None)
    if pages is None:
        pages = _scratch.pages = (mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES))
    return pages


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
