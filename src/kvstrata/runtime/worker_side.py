"""The half beside one rank: moves bytes, decides nothing.

A step's message brings copies between the device and the arena, and jobs for the tiers below. Loads
start with the message, stores after the step; both run beside what the rank computes. What has
ended goes back with the step's report. Engines that do not say when a step was computed have its
stores started with the next one: their blocks are held until then.

Ownership: the rank's thread calls everything here; threads own what their queues say.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from kvstrata.core.ids import ChunkKey
from kvstrata.core.outcomes import Deadline
from kvstrata.hierarchy.task_queue import Verb
from kvstrata.runtime.messages import (
    NO_NEWS,
    NO_WORK,
    RankReport,
    TierReportMessage,
    decode_step,
    encode,
)
from kvstrata.runtime.seam import EndedLoads
from kvstrata.transfers.copy_queue import CopyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.hierarchy.tier_io import TierIO
    from kvstrata.runtime.messages import StepMessage, TierJobMessage
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import LayerCache
    from kvstrata.transfers.copy_queue import Copies, CopyJob


class RankMemory:
    """What a rank has once its caches are known.

    Args:
        arena: its memory for chunks.
        copies: its way between arena and device.
        tiers: its traffic with each lower tier, in the order of the configuration.
    """

    def __init__(self, arena: HostArena, copies: Copies, tiers: Sequence[TierIO]) -> None:
        self.arena = arena
        self.copies = copies
        self.tiers = tuple(tiers)

    def close(self) -> None:
        """Stop all threads and give the arena back; a hung medium keeps its memory."""
        with contextlib.ExitStack() as closing:  # whatever one of them raises
            closing.callback(self._close_arena)
            for tier in self.tiers:
                closing.callback(tier.close)
            self.copies.close()

    def _close_arena(self) -> None:
        with contextlib.suppress(BufferError):
            self.arena.close()


class WorkerSide:
    """One rank's half.

    Args:
        rank: which rank.
        open_memory: makes arena, copier and tiers when the caches are known.
    """

    def __init__(
        self,
        rank: int,
        open_memory: Callable[[KVLayout, Mapping[str, LayerCache], int], RankMemory],
    ) -> None:
        self._rank = rank
        self._open_memory = open_memory
        self._memory: RankMemory | None = None
        self._stores: list[CopyJob] = []
        self._loads: dict[int, CopyJob] = {}
        """Those under way on this rank."""
        self._ended = EndedLoads()

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        """Open everything that depends on the caches.

        Raises:
            ConfigError: something that is required cannot be opened.
            LayoutError: the caches cannot be read with certainty.
        """
        self._memory = self._open_memory(layout, caches, num_blocks)

    def start_step(self, message: bytes) -> None:
        """Start loads and tier jobs."""
        self.start_stores()
        if message != NO_WORK:
            self._start_work(self._opened, decode_step(message))

    def finish_step(self) -> bytes:
        """Start stores, and say what has ended."""
        self.start_stores()
        return self.report()

    def start_stores(self) -> None:
        """The step has been computed: start its stores. Does nothing on successive calls."""
        if self._stores:
            stores, self._stores = self._stores, []
            self._opened.copies.submit(stores)

    def report(self, spoiled: Container[str] = ()) -> bytes:
        """Say what has ended since the last report.

        Args:
            spoiled: requests to which a load brings what they cannot use: it has failed.
        """
        memory = self._opened
        copy_reports = [self._note_end(r, spoiled) for r in memory.copies.take_reports()]
        tier_reports: list[TierReportMessage] = []
        evicted: list[tuple[ChunkKey, ...]] = []
        for index, tier in enumerate(memory.tiers):
            tier_reports.extend(TierReportMessage.of(index, r) for r in tier.take_reports())
            evicted.append(tuple(tier.take_evicted()))
        if not (copy_reports or tier_reports or any(evicted)):
            return NO_NEWS
        return encode(RankReport(tuple(tier_reports), tuple(copy_reports), tuple(evicted)))

    def take_ended_loads(self) -> EndedLoads:
        """Hand over the requests whose loads ended on this rank, for engines that ask ranks."""
        ended, self._ended = self._ended, EndedLoads()
        return ended

    def close(self) -> None:
        """Stop. Does nothing on successive calls."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def _opened(self) -> RankMemory:
        assert self._memory is not None, "register_caches comes first"
        return self._memory

    def _start_work(self, memory: RankMemory, message: StepMessage) -> None:
        jobs = message.copies
        self._stores = [job for job in jobs if not job.is_load]
        memory.copies.submit([job for job in jobs if job.is_load])
        self._loads |= {job.job_id: job for job in jobs if job.is_load}
        if message.lost_loads:
            self._ended = self._ended.with_failed(message.lost_loads)
        for tier_job in message.tier_jobs:
            self._start(memory, tier_job)

    def _note_end(self, report: CopyReport, spoiled: Container[str]) -> CopyReport:
        """Remember the end of a load, if it is one; how it counts."""
        job = self._loads.pop(report.job_id, None)
        if job is None or job.waiting_request is None:
            return report
        if job.waiting_request in spoiled:
            keys = frozenset(copy.key for copy in job.chunks)
            report = CopyReport(report.job_id, keys, 0, report.seconds)
        if report.failed:
            self._ended = self._ended.with_failed([job.waiting_request])
        else:
            self._ended = self._ended.with_done([job.waiting_request])
        return report

    def _start(self, memory: RankMemory, job: TierJobMessage) -> None:
        tier = memory.tiers[job.tier]
        verb = Verb(job.verb)
        deadline = Deadline(time.monotonic() + job.seconds_left)
        if verb is Verb.FIND:
            if self._rank == 0:
                tier.find(job.job_id, [ChunkKey(key) for key in job.keys], deadline)
            return
        placed = [chunk.read() for chunk in job.chunks]
        buffers = [memory.arena.buffer(label, extents) for label, extents in placed]
        tier.move(job.job_id, verb, buffers, deadline)
