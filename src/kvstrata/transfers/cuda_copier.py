"""Copies between caches on a GPU and the arena, on a stream of their own.

Everything of a job is put on the stream, and the thread waits for its end. The stream first waits
for what the engine had put on its own when the job was submitted, so a store reads what the step
has computed, and a load does not overwrite what a step still reads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob

_log = logging.getLogger(__name__)


class DeviceRows(Protocol):
    """Moves chunks on the current stream; returns before the bytes are there."""

    def load(self, copies: Sequence[ChunkCopy]) -> None:
        """From the arena into the caches."""
        ...

    def store(self, copies: Sequence[ChunkCopy]) -> None:
        """From the caches into the arena."""
        ...


class CudaCopier:
    """Moves jobs.

    Args:
        views: the engine's caches, on a GPU.
        rows: moves chunks there.
    """

    def __init__(self, views: CacheViews, rows: DeviceRows) -> None:
        self.views = views
        self._rows = rows
        self._stream = torch.cuda.Stream(views.device)

    def mark(self) -> torch.cuda.Event:
        """What the engine has put on its stream so far. Called on the rank's thread."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.views.device))
        return event

    def run(self, job: CopyJob, mark: object) -> frozenset[ChunkKey]:
        """Move all chunks of a job; the keys of those that failed: all or none."""
        assert isinstance(mark, torch.cuda.Event)
        copies = [copy for copy in job.chunks if copy.rows]
        try:
            with torch.cuda.device(self.views.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(mark)
                if copies:
                    (self._rows.load if job.is_load else self._rows.store)(copies)
                self._stream.synchronize()
        except Exception:  # noqa: BLE001 - a fault costs this job, never the thread
            _log.exception("copies on %s failed", self.views.device)
            return frozenset(copy.key for copy in job.chunks)
        return frozenset()


def make_rows(views: CacheViews, arena: HostArena) -> DeviceRows:
    """Straight over the bus where the arena is pinned and Triton is there, else with a buffer."""
    from kvstrata.transfers.staged_rows import StagedRows  # noqa: PLC0415 - one of the two

    if not arena.is_pinned:
        _log.warning("the arena could not be pinned: copies to and from %s are slow", views.device)
        return StagedRows(views, arena)
    try:
        from kvstrata.transfers.pinned_rows import PinnedRows  # noqa: PLC0415 - needs Triton
    except ImportError:
        return StagedRows(views, arena)
    return PinnedRows(views, arena)
