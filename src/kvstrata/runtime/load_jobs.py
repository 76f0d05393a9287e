"""Loads under way: chunks leased in the arena while ranks copy them to the device.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.core.spans import TokenSpan
from kvstrata.transfers.copy_plans import load_copies
from kvstrata.transfers.copy_queue import CopyJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.ids import ChunkKey, GroupId
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

    def bytes_by_group(self) -> Counter[GroupId]:
        """Bytes to copy on each rank, by group."""
        sizes: Counter[GroupId] = Counter()
        for load in self.plan.loads:
            chunks = self.request.grid.geometry.groups[load.group_id]
            sizes[load.group_id] += chunks.chunk_bytes * len(load.chunks)
        return sizes

    def tokens_by_source(self, source_of: Callable[[ChunkKey], str]) -> Counter[str]:
        """The tokens of the hit, by where the chunks came from that cover most of it.

        Args:
            source_of: asked once for every chunk of the load.
        """
        sources = {key: source_of(key) for key in self.keys}
        grid = self.request.grid
        widest = max(self.plan.loads, key=lambda load: len(load.tokens))
        hit = TokenSpan(self.plan.local_tokens, self.plan.num_tokens)
        tokens: Counter[str] = Counter()
        for index in widest.chunks:
            span = grid.geometry.groups[widest.group_id].tokens(index)
            tokens[sources[grid.key(widest.group_id, index)]] += len(span.intersection(hit))
        last = sources[grid.key(widest.group_id, widest.chunks.stop - 1)]
        tokens[last] += len(hit) - tokens.total()
        return tokens


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
        self._loads[job_id] = Load(request, plan, keys)
        return CopyJob(job_id, copies, waiting_request=request.request_id)

    def find(self, request_id: str) -> Load | None:
        """A request's load under way."""
        loads = (load for load in self._loads.values() if load.request.request_id == request_id)
        return next(loads, None)

    def end(self, report: CopyReport) -> Load | None:
        """Let go of a load's chunks; None: the job is none of these."""
        load = self._loads.pop(report.job_id, None)
        if load is not None:
            self._host.release(load.keys)
        return load
