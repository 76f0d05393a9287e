"""One tier over all ranks: a job for every rank, one outcome for all.

A rank may run in this process or in another: `RankChannel` is the way to it.

Ownership: everything here belongs to the thread that submits and takes outcomes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

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


class RankChannel(Protocol):
    """The way to one rank's traffic with one tier. Nothing here blocks."""

    def move(self, job_id: int, verb: Verb, chunks: Sequence[Placed], deadline: Deadline) -> None:
        """Have the rank read or write the chunks' places in its arena."""
        ...

    def find(self, job_id: int, keys: Sequence[ChunkKey], deadline: Deadline) -> None:
        """Have the rank ask about keys."""
        ...

    def take_reports(self) -> list[IOReport]:
        """Hand over what the rank has reported since the last call."""
        ...

    def close(self) -> None:
        """Let go of the rank."""
        ...


class LocalChannel:
    """A rank in this process.

    Args:
        io: its traffic with the tier.
        arena: its memory.
    """

    def __init__(self, io: TierIO, arena: HostArena) -> None:
        self._io = io
        self._arena = arena
        self.find = io.find
        self.take_reports = io.take_reports
        self.close = io.close

    def move(self, job_id: int, verb: Verb, chunks: Sequence[Placed], deadline: Deadline) -> None:
        """Start to read or write."""
        buffers = [self._arena.buffer(label, extents) for label, extents in chunks]
        self._io.move(job_id, verb, buffers, deadline)


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
        channels: the way to each rank.
    """

    def __init__(self, channels: Sequence[RankChannel]) -> None:
        self._channels = tuple(channels)
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
        self._channels[0].find(job_id, keys, deadline)
        return job_id

    def take_reports(self) -> list[TierReport]:
        """Hand over what has ended on every rank since the last call. Never blocks."""
        reports: list[TierReport] = []
        for rank, channel in enumerate(self._channels):
            for report in channel.take_reports():
                reports.extend(self._count(rank, report))
        return reports

    def close(self) -> None:
        """Stop every rank's threads and close their stores."""
        for channel in self._channels:
            channel.close()

    def _move(self, verb: Verb, chunks: Sequence[Placed], deadline: Deadline) -> int:
        job_id = next(self._job_ids)
        self._quorums[job_id] = _Quorum(verb, set(range(len(self._channels))))
        for channel in self._channels:
            channel.move(job_id, verb, chunks, deadline)
        return job_id

    def _count(self, rank: int, report: IOReport) -> list[TierReport]:
        quorum = self._quorums.get(report.job_id)
        if quorum is None:  # of a job that nobody waits for
            return []
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
