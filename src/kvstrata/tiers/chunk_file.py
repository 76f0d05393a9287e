"""One chunk as one file: written aside, synced, renamed; read and checked as a whole.

Payloads move between file and buffer without a copy in this process: header and parts go through
one vectored call. Direct I/O is used where the file system takes it and the parts lie on pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
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
    from pathlib import Path

    from kvstrata.config.schema import Durability
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank

PAGE_BYTES: Final = 4096
_MOST_PARTS: Final = 1024  # IOV_MAX on Linux
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_scratch: Final = threading.local()


class NewChunkFile:
    """A chunk's file while it is written: its name leads to the whole of it or to nothing.

    From the start the temporary file has its final size, so that whoever counts files while it is
    written counts it in full. Leaving the context without `publish` removes it.

    Args:
        path: where the chunk will be found.
        chunk: what is written.
        direct: whether to go past the page cache, if the parts allow it.

    Raises:
        OSError: as the file system says.
    """

    def __init__(self, path: Path, chunk: ChunkBuffer, *, direct: bool) -> None:
        self._path = path
        self._chunk = chunk
        self._direct = direct and _is_aligned(chunk)
        self._size = HEADER_BYTES + chunk.label.payload_bytes
        self._temporary = temporary_path(path.parent)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags | (_DIRECT if self._direct else 0), 0o600)

    def __enter__(self) -> Self:
        os.ftruncate(self._fd, self._size)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)
        self._temporary.unlink(missing_ok=True)

    def fill(self, namespace: Namespace, rank: Rank) -> None:
        """Write header and payload.

        Raises:
            OSError: as the file system says.
        """
        chunk, header = self._chunk, _header_page()
        header[:] = make_header(chunk.label, namespace, rank, chunk.payload())
        payload = _whole_pages(chunk) if self._direct else chunk.payload()
        _write_fully(self._fd, [memoryview(header), *payload])
        if self._direct:
            os.ftruncate(self._fd, self._size)

    def publish(self, durability: Durability) -> None:
        """Give the file its name, after syncing as much as asked for.

        Raises:
            OSError: as the file system says.
        """
        if durability != "none":
            os.fdatasync(self._fd)
        self._temporary.replace(self._path)
        if durability == "full":
            _sync_folder(self._path.parent)


def read_chunk(
    path: Path, chunk: ChunkBuffer, owner: tuple[Namespace, Rank], *, direct: bool
) -> None:
    """Fill a buffer from a file, check everything, and note the use.

    Raises:
        FileNotFoundError: there is no such chunk.
        OSError: as the file system says.
        BadChunk: the file is not the chunk that was asked for.
    """
    header = _header_page()
    fd = _open_for_reading(path, direct=direct and _is_aligned(chunk))
    try:
        expected = HEADER_BYTES + chunk.label.payload_bytes
        size = os.fstat(fd).st_size
        if size != expected:
            raise BadChunk(f"file of {size} bytes instead of {expected}")
        _read_fully(fd, [memoryview(header), *_whole_pages(chunk)], expected)
        found = parse_header(memoryview(header))
        check_header(found, chunk.label, *owner)
        check_payload(found, chunk.payload())
        _note_use(fd)
    finally:
        os.close(fd)


def takes_direct_io(folder: Path) -> bool:
    """Whether files in this folder can be written past the page cache."""
    if not _DIRECT:
        return False
    path = temporary_path(folder)
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | _DIRECT, 0o600)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    try:
        return os.pwrite(fd, _header_page(), 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _write_fully(fd: int, views: Sequence[memoryview]) -> None:
    offset = 0
    while views:
        written = os.pwritev(fd, views[:_MOST_PARTS], offset)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        views = _after(views, written)


def _read_fully(fd: int, views: Sequence[memoryview], size: int) -> None:
    offset = 0
    while offset < size:
        count = os.preadv(fd, views[:_MOST_PARTS], offset)
        if count == 0:
            raise BadChunk(f"file ended after {offset} of {size} bytes")
        offset += count
        views = _after(views, count)


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
    views, left = [], ceil_to(chunk.label.payload_bytes, PAGE_BYTES)
    for part in chunk.parts:
        views.append(part[: min(left, part.nbytes)])
        left -= views[-1].nbytes
    return [view for view in views if view.nbytes]


def _is_aligned(chunk: ChunkBuffer) -> bool:
    """Whether every part starts and ends on a page, up to the payload's last one."""
    pages = _whole_pages(chunk)
    return all(
        not view.readonly and view.nbytes % PAGE_BYTES == 0 and _address(view) % PAGE_BYTES == 0
        for view in pages
    )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _header_page() -> mmap.mmap:
    """This thread's page for headers: aligned, and reused."""
    page: mmap.mmap | None = getattr(_scratch, "page", None)
    if page is None:
        page = _scratch.page = mmap.mmap(-1, PAGE_BYTES)
    return page


def _open_for_reading(path: Path, *, direct: bool) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if direct else 0))


def _note_use(fd: int) -> None:
    """Recency is the access time, set by hand: few mounts keep it, and nothing is rewritten."""
    os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
