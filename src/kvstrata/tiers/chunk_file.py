"""One chunk as one file: written aside, synced, renamed; read and checked as a whole."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.tiers import file_io
from kvstrata.tiers.chunk_format import HEADER_BYTES, BadChunk, check_chunk, unsealed_header
from kvstrata.tiers.file_layout import temporary_path

if TYPE_CHECKING:
    from kvstrata.config.schema import Durability
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank

_DIRECT: Final = getattr(os, "O_DIRECT", 0)

_scratch: Final = threading.local()


class PublishedUnsynced(OSError):  # noqa: N818 - what it is
    """The file has its name, but closing it or syncing its folder failed."""


def write_chunk(
    path: str,
    chunk: ChunkBuffer,
    owner: tuple[Namespace, Rank],
    *,
    direct: bool,
    durability: Durability,
) -> None:
    """Write a chunk's file: its name leads to the whole of it or to nothing.

    Raises:
        PublishedUnsynced: the file is there, but may not survive a crash.
        OSError: as the file system says; there is no file.
    """
    folder, header = os.path.dirname(path), _scratch_page()  # noqa: PTH120 - a string is faster
    header[:] = unsealed_header(chunk.label, *owner)
    error = file_io.calls.write(
        temporary_path(folder),
        path,
        header,
        chunk.parts,
        num_bytes=HEADER_BYTES + chunk.label.payload_bytes,
        direct=direct,
        sync=durability != "none",
    )
    if error:
        raise PublishedUnsynced(error, os.strerror(error), path)
    if durability == "full":
        _sync_folder(folder)


def read_chunk(
    path: str,
    chunk: ChunkBuffer,
    owner: tuple[Namespace, Rank],
    *,
    direct: bool,
    note_use: bool,
) -> None:
    """Fill a buffer from a file and check everything.

    Raises:
        FileNotFoundError: there is no such chunk.
        OSError: as the file system says.
        BadChunk: the file is not the chunk that was asked for.
    """
    header, size = _scratch_page(), HEADER_BYTES + chunk.label.payload_bytes
    count, digest = file_io.calls.read(
        path, header, chunk.parts, num_bytes=size, direct=direct, note_use=note_use
    )
    if count != size:
        raise BadChunk(
            f"file of {'more than ' * (count > size)}{min(count, size)} bytes, expected {size}"
        )
    check_chunk(header[:], chunk.label, *owner, digest)


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
        return os.pwrite(fd, _scratch_page(), 0) == HEADER_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        Path(path).unlink(missing_ok=True)


def _scratch_page() -> mmap.mmap:
    """This thread's page for headers: aligned, and reused."""
    page: mmap.mmap | None = getattr(_scratch, "page", None)
    if page is None:
        page = _scratch.page = mmap.mmap(-1, HEADER_BYTES)
    return page


def _sync_folder(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise PublishedUnsynced(error.errno, error.strerror, path) from error
