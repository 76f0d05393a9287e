"""How whole chunks move between files and memory: native calls where they were built, else Python.

A chunk's file is one header page and the payload, which lies in memory in several parts. Direct
I/O is used where it is asked for and header and parts lie on pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from kvstrata.tiers import python_file_io

if TYPE_CHECKING:
    import mmap


class FileCalls(Protocol):
    """What both implementations offer. Calls block; threads may call at the same time."""

    def add(self, fd: int, change: bytes, /) -> bytes:
        """Add to the counters in a file, 64 bits each, under its lock; the sums.

        Raises:
            BlockingIOError: the lock is taken.
            OSError: as the file system says.
        """
        ...

    def read(
        self,
        path: str,
        header: mmap.mmap,
        parts: tuple[memoryview, ...],
        /,
        *,
        num_bytes: int,
        direct: bool,
        note_use: bool,
    ) -> tuple[int, bytes]:
        """Read a file that should have `num_bytes` bytes, header included.

        Bytes behind the payload's end, up to its last page, may change as well.

        Returns:
            how many bytes it has (a page too many stands for all that is too many), and its
            payload's checksum, empty if the size is wrong.

        Raises:
            OSError: as the file system says.
        """
        ...

    def write(  # noqa: PLR0913 - one call for all that a chunk needs
        self,
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
        """Complete the header, write a file aside, under a lock, and give it its name.

        Returns:
            the number of the error that closing it ended with, once it had its name; 0 for none.

        Raises:
            OSError: as the file system says; the file did not get its name, and is gone.
        """
        ...


def _native_calls() -> FileCalls | None:
    """None where there was no compiler, or no header of libxxhash, to build them with."""
    try:
        from kvstrata.tiers import _file_io  # noqa: PLC0415 - may not be there
    except ImportError:
        return None
    return _file_io


_native: Final = _native_calls()
HAS_NATIVE: Final = _native is not None
calls: FileCalls = _native or python_file_io
"""Chosen once."""
