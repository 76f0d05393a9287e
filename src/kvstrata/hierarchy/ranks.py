"""One tier over all ranks of this process: a job for every rank, one outcome for all.

Ownership: everything here belongs to the thread that submits and takes outcomes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.core.outcomes import TierOutcome
from kvstrata.hierarchy.task_queue import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.hierarchy.tier_io import IOReport, TierIO
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.tiers.room import Extent


class Placed(NamedTuple):
    """A chunk and its place in every rank's arena."""

    label: ChunkLabel
    extents: tuple[Extent, ...]


class TierReport(NamedTuple):
    """How a job ended on all ranks, or what they let go of."""

    job_id: int
    verb: Verb
    outcome: TierOutcome
    """Done: on every rank. Empty in a report that only releases."""
    held: frozenset[ChunkKey]
    """Keys whose memory some rank's medium may still touch."""
    released: frozenset[ChunkKey]
    """Keys that no rank holds any more."""
    hurried: frozenset[ChunkKey]
    """Keys that ran out of time without the tier being to blame."""
    slowest_s: float
    """The longest that a medium took for one task."""
    seconds: float
    """The longest that a rank took for the job."""


@dataclass(slots=True)
class _Quorum:
    """The reports of one job so far."""

    verb: Verb
    waiting: set[int]
    outcome: TierOutcome | None = None
    held: dict[ChunkKey, int] = field(default_factory=dict)
    """Keys still held, with the number of ranks that do."""
    hurried: frozenset[ChunkKey] = frozenset()
    slowest_s: float = 0.0
    seconds: float = 0.0

    def add(self, rank: int, report: IOReport) -> None:
        """Take in one rank's report."""
        self.waiting.discard(rank)
        self.outcome = _on_all(self.outcome, report.outcome)
        self.hurried |= report.hurried
        self.slowest_s = max(self.slowest_s, report.slowest_s)
        self.seconds = max(self.seconds, report.seconds)

    def ended(self, job_id: int) -> TierReport:
        """The report of all ranks."""
        assert self.outcome is not None  # every rank has reported
        held = frozenset(self.held)
        nothing: frozenset[ChunkKey] = frozenset()
        return TierReport(
            job_id,
            self.verb,
            self.outcome,
            held,
            nothing,
            self.hurried,
            self.slowest_s,
            self.seconds,
        )

    def let_go(self, job_id: int, released: frozenset[ChunkKey]) -> TierReport:
        """The report that memory is free again."""
        nothing: frozenset[ChunkKey] = frozenset()
        return TierReport(
            job_id, self.verb, TierOutcome(), nothing, released, nothing, 0.0, self.seconds
        )


class RankedTier:
    """A tier with one store, one arena and one set of threads per rank.

    Args:
        ios: per rank its traffic with the tier.
        arenas: per rank its memory.
    """

    def __init__(self, ios: Sequence[TierIO], arenas: Sequence[HostArena]) -> None:
        self._ranks = list(zip(ios, arenas, strict=True))
        self._job_ids = itertools.count(1)
        self._quorums: dict[int, _Quorum] = {}

    def read(self, chunks: Sequence[Placed], deadline: Deadline) -> int:
        """Fill the arenas' places from the tier; returns the job."""
        return self._move(Verb.READ, chunks, deadline)

    def write(self, chunks: Sequence[Placed], deadline: Deadline) -> int:
        """Write the arenas' places to the tier; returns the job."""
        return self._move(Verb.WRITE, chunks, deadline)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> int:
        """Ask which keys all ranks have; one rank can tell for all. Returns the job."""
        job_id = next(self._job_ids)
        self._quorums[job_id] = _Quorum(Verb.FIND, {0})
        self._ranks[0][0].find(job_id, keys, deadline)
        return job_id

    def take_reports(self) -> list[TierReport]:
        """Hand over what has ended on every rank since the last call. Never blocks."""
        reports: list[TierReport] = []
        for rank, (io, _) in enumerate(self._ranks):
            for report in io.take_reports():
                reports.extend(self._count(rank, report))
        return reports

    def close(self) -> None:
        """Stop every rank's threads and close their stores."""
        for io, _ in self._ranks:
            io.close()

    def _move(self, verb: Verb, chunks: Sequence[Placed], deadline: Deadline) -> int:
        job_id = next(self._job_ids)
        self._quorums[job_id] = _Quorum(verb, set(range(len(self._ranks))))
        for io, arena in self._ranks:
            buffers = [arena.buffer(label, extents) for label, extents in chunks]
            io.move(job_id, verb, buffers, deadline)
        return job_id

    def _count(self, rank: int, report: IOReport) -> list[TierReport]:
        quorum = self._quorums[report.job_id]
        for key in report.held:
            quorum.held[key] = quorum.held.get(key, 0) + 1
        released = frozenset(key for key in report.released if _let_go(quorum, key))
        reports = []
        if rank in quorum.waiting:
            quorum.add(rank, report)
            if not quorum.waiting:
                reports.append(quorum.ended(report.job_id))
        elif released and not quorum.waiting:
            reports.append(quorum.let_go(report.job_id, released))
        if not quorum.waiting and not quorum.held:
            del self._quorums[report.job_id]
        return reports


def _let_go(quorum: _Quorum, key: ChunkKey) -> bool:
    """Count one rank less; whether it was the last that held the key."""
    quorum.held[key] -= 1
    if quorum.held[key]:
        return False
    del quorum.held[key]
    return True


def _on_all(before: TierOutcome | None, rank: TierOutcome) -> TierOutcome:
    """Several ranks' outcome: a chunk is done if on each, absent or failed if on any."""
    if before is None:
        return rank
    failed = {**before.failed, **rank.failed}
    absent = (before.absent | rank.absent) - failed.keys()
    return TierOutcome(before.done & rank.done, absent, failed)
