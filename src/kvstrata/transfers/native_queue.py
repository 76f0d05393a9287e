"""Copies between caches in host memory and a rank's arena, outside the interpreter.

A thread of Python that copies takes the interpreter's lock several times for each job, and an
engine in the same process waits for it every time: 0.1 ms a job. This one takes it never. Jobs are
checked when they are submitted, with the lock, and copied by a thread that stays in a native call;
small ones at once, because to wake the thread would take longer.

Ownership: the rank's thread calls everything here; the native queue guards what the two share.
"""

from __future__ import annotations

import logging
import struct
import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata.tiers.room import PAGE_BYTES, Extent
from kvstrata.transfers.copy_queue import CopyReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.canonical import CanonicalKVCaches, GroupPages
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import CopyJob

    Chunk = tuple[int, tuple[Extent, ...], int, tuple[int, ...], int]
    """Group, extents, bytes of the payload, rows of the caches, first row of the payload."""
    Group = tuple[bytes, int]
    """Packed pieces, and how many rows there are."""

_log = logging.getLogger(__name__)

_AT_ONCE_BYTES: Final = 512 * 1024
"""Copied in the 0.05 ms that it takes to wake a thread on another core."""
_PIECE: Final = struct.Struct("=qqq")
"""Address of the first row, distance of rows, bytes of a row."""


class RowQueue(Protocol):
    """The native queue.

    Payloads lie as `CacheViews` makes them. What groups describe must be there until it is closed.
    """

    def submit(self, job_id: int, is_load: bool, chunks: tuple[Chunk, ...], /) -> None:  # noqa: FBT001
        """Start a job; a small one is done then. With an error, nothing of it is ever copied.

        Raises:
            IndexError: there is no such group, row or page.
            ValueError: a payload has not so many rows, not whole ones, for a store others as well,
                or its extents have no room for it; or the queue is closed.
        """
        ...

    def take(self) -> list[tuple[int, int, float]]:
        """Hand over the jobs that have ended, with their bytes and seconds. Never blocks."""
        ...

    def work(self) -> None:
        """Copy, loads first, until it is closed. Blocks, without the interpreter's lock."""
        ...

    def close(self) -> None:
        """Wait until `work` has returned, and let go of the arena; what has not begun is dropped.

        Does nothing on successive calls.
        """
        ...


class MakeRowQueue(Protocol):
    """The native queue's type."""

    def __call__(
        self, arena: memoryview, page_bytes: int, groups: tuple[Group, ...], at_once_bytes: int, /
    ) -> RowQueue:
        """Make one.

        Args:
            arena: memory for chunks.
            page_bytes: what extents count.
            groups: the caches.
            at_once_bytes: jobs of up to so many bytes are small.

        Raises:
            BufferError: the memory cannot be written to.
            ValueError: pieces or sizes make no sense.
        """
        ...


class NativeQueue:
    """One rank's copies, as `CopyQueue` does them; a job fails as a whole.

    Args:
        views: the engine's caches, in host memory.
        arena: the rank's memory for chunks.
        make_rows: makes the native queue.
        at_once_bytes: jobs of up to so many bytes are copied by the caller.
    """

    def __init__(
        self,
        views: CacheViews,
        arena: HostArena,
        make_rows: MakeRowQueue,
        at_once_bytes: int = _AT_ONCE_BYTES,
    ) -> None:
        assert views.device.type == "cpu", "only host memory can be reached"
        self._views = views  # keeps the caches' memory
        [memory] = arena.parts([Extent(0, arena.num_bytes // PAGE_BYTES)])
        groups = tuple(_packed(views.canonical, pages) for pages in views.canonical.groups)
        self._rows = make_rows(memory, PAGE_BYTES, groups, at_once_bytes)
        self._refused: list[CopyReport] = []
        self._thread = threading.Thread(target=self._rows.work, name="kvstrata-copies", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        """Start copies. Returns at once."""
        for job in jobs:
            chunks = tuple(
                (copy.group_id, copy.extents, copy.payload_bytes, copy.rows, copy.first_row)
                for copy in job.chunks
            )
            try:
                self._rows.submit(job.job_id, job.is_load, chunks)
            except (IndexError, ValueError):
                _log.exception("copies of job %d cannot be right", job.job_id)
                failed = frozenset(copy.key for copy in job.chunks)
                self._refused.append(CopyReport(job.job_id, failed, 0, 0.0))

    def take_reports(self) -> list[CopyReport]:
        """Hand over what has ended since the last call. Never blocks."""
        reports, self._refused = self._refused, []
        for job_id, num_bytes, seconds in self._rows.take():
            reports.append(CopyReport(job_id, frozenset(), num_bytes, seconds))
        return reports

    def close(self) -> None:
        """Finish the copy under way and stop; what has not begun is dropped."""
        self._rows.close()
        self._thread.join()


def native_rows() -> MakeRowQueue | None:
    """The native queue; None where there was no compiler to build it with."""
    try:
        from kvstrata.transfers import _row_queue  # noqa: PLC0415 - may not be there
    except ImportError:
        return None
    return _row_queue.RowQueue


def _packed(caches: CanonicalKVCaches, pages: GroupPages) -> Group:
    matrices = [caches.matrices[piece.matrix] for piece in pages.pieces]
    pieces = b"".join(
        _PIECE.pack(matrix.storage + matrix.offset + piece.start, matrix.row_stride, piece.length)
        for piece, matrix in zip(pages.pieces, matrices, strict=True)
    )
    return pieces, min(matrix.num_rows for matrix in matrices)
