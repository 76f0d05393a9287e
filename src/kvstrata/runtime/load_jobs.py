"""Loads under way: chunks leased in the arena while ranks copy them to the device.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.transfers.copy_plans import load_copies
from kvstrata.transfers.copy_queue import CopyJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.planning.load_plan import LoadPlan
    from kvstrata.runtime.tracked_request import TrackedRequest
    from kvstrata.tiers.host_memory import HostMemoryIndex
    from kvstrata.transfers.copy_queue import CopyReport


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way."""

    request: TrackedRequest
    plan: LoadPlan
    keys: tuple[ChunkKey, ...]
    num_bytes: int


class LoadJobs:
    """All loads under way, at most one for each request.

    Args:
        host: whose chunks are leased.
    """

    def __init__(self, host: HostMemoryIndex) -> None:
        self._host = host
        self._loads: dict[int, Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def start(
        self,
        job_id: int,
        request: TrackedRequest,
        plan: LoadPlan,
        tables: Sequence[Sequence[int]],
    ) -> CopyJob:
        """Lease the chunks of a plan.

        Raises:
            KeyError: one of them is not in the arena any more; nothing was leased.
        """
        copies = tuple(load_copies(request.grid, plan, tables, self._host.extents))
        keys = tuple(dict.fromkeys(copy.key for copy in copies))
        self._host.lease(keys)
        num_bytes = sum(copy.payload_bytes for copy in copies)
        self._loads[job_id] = Load(request, plan, keys, num_bytes)
        return CopyJob(job_id, is_load=True, chunks=copies)

    def end(self, report: CopyReport) -> Load | None:
        """Let go of a load's chunks; None: the job is none of these."""
        load = self._loads.pop(report.job_id, None)
        if load is not None:
            self._host.release(load.keys)
        return load
