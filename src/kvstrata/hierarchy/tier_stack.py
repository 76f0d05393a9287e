"""Several tiers as one: host memory on top, the others below.

Chunks go down after they were stored (`demote`) and come up when a request needs them (`promote`).
A chunk counts as READY only in host memory, where every rank has checked it; below, it is at best
ARRIVING. Nothing here blocks: work is handed to the ranks' threads, and `poll` applies what they
report.

Ownership: everything belongs to the scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.lookups import ChunkLookup, LookupCodes, to_codes
from kvstrata.core.outcomes import Deadline
from kvstrata.errors import ChunkCorrupt
from kvstrata.hierarchy.changes import ChangesDraft, Moved
from kvstrata.hierarchy.demotions import Demotions
from kvstrata.hierarchy.known_chunks import Presence
from kvstrata.hierarchy.lower_tier import standing
from kvstrata.hierarchy.promotions import Promotions
from kvstrata.hierarchy.task_queue import Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.hierarchy.changes import Changes
    from kvstrata.hierarchy.lower_tier import Fault, LowerTier
    from kvstrata.hierarchy.ranks import TierReport
    from kvstrata.tiers.host_memory import HostMemoryIndex

_CHECK_S: Final = 10.0
"""How long a question may take that nobody waits for."""
_MOST_REPORTED: Final = 100_000
"""Corrupt chunks remembered as reported; then all are forgotten."""


class TierStack:
    """Host memory and the tiers below it.

    Args:
        host: the index of all ranks' arenas.
        tiers: the tiers below, in the order of the configuration.
        clock: monotonic seconds.
        write_s: how long a write to a lower tier may take.
    """

    def __init__(
        self,
        host: HostMemoryIndex,
        tiers: Sequence[LowerTier],
        clock: Callable[[], float],
        write_s: float = 30.0,
    ) -> None:
        self.host = host
        self._tiers = tuple(tiers)
        self._clock = clock
        self._promotions = Promotions(host, self._tiers, clock)
        self._demotions = Demotions(host, clock, write_s)
        self._num_asking = 0
        self._doubtful: set[tuple[str, ChunkKey]] = set()
        """Chunks that may or may not be in a lower tier; it is asked when it has settled."""
        self._checking: set[tuple[str, ChunkKey]] = set()
        """Those of them that a question is under way about."""
        self._reported: set[tuple[str, bytes]] = set()

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Writes not taken because too many waited, by tier."""
        return self._demotions.num_dropped

    @property
    def num_pending(self) -> int:
        """Promotions and demotions under way, and questions asked."""
        return len(self._promotions) + len(self._demotions) + self._num_asking

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """What all tiers together know about each key. Never blocks. Changes nothing."""
        codes = self.host.lookup(keys)
        if not self._tiers or ChunkLookup.ABSENT not in codes:
            return codes
        return to_codes(
            standing(self._tiers, key) if code == ChunkLookup.ABSENT else ChunkLookup(code)
            for key, code in zip(keys, codes, strict=True)
        )

    def ask(self, keys: Sequence[ChunkKey], deadline: Deadline) -> None:
        """Find out about keys that are not in host memory. Returns at once."""
        codes = self.host.lookup(keys)
        absent = [k for k, code in zip(keys, codes, strict=True) if code == ChunkLookup.ABSENT]
        for tier in self._tiers:
            unknown = [k for k in absent if tier.known.presence(k) is Presence.UNKNOWN]
            if unknown and tier.breaker.allows():
                tier.known.asked(unknown)
                tier.find(unknown, deadline)
                self._num_asking += 1

    def promote(self, labels: Sequence[ChunkLabel], deadline: Deadline) -> None:
        """Bring chunks up from the tiers that have them. Returns at once."""
        self._promotions.start(labels, deadline)

    def take_evicted(self) -> tuple[ChunkKey, ...]:
        """Hand over what has left host memory for promotions since the last call or poll."""
        return self._promotions.take_evicted()

    def demote(self, labels: Sequence[ChunkLabel]) -> None:
        """Copy READY chunks down to every tier that lacks them and takes them. Returns at once."""
        for tier in self._tiers:
            self._demotions.start(tier, labels)

    def poll(self) -> Changes:
        """Apply what the ranks have reported. Never blocks."""
        draft = ChangesDraft()
        for tier in self._tiers:
            for report in tier.ranks.take_reports():
                self._take(tier, report, draft)
            self._ask_if_settled(tier)
        return draft.finished(self._promotions.take_lost(), self._promotions.take_evicted())

    def evicted_below(self, index: int, keys: Sequence[ChunkKey]) -> str:
        """A lower tier let go of chunks by itself; its name.

        Of one that is being written, or was just written, nobody knows which came first.
        """
        tier = self._tiers[index]
        is_doubtful = {key: self._demotions.is_writing(tier, key) or tier.has(key) for key in keys}
        self._doubtful.update((tier.name, key) for key in keys if is_doubtful[key])
        tier.known.missed(keys)
        return tier.name

    def is_in_doubt(self, key: ChunkKey) -> bool:
        """Whether a chunk may turn out to be in a lower tier."""
        return any(
            (tier.name, key) in self._doubtful
            or (tier.name, key) in self._checking
            or self._demotions.is_writing(tier, key)
            for tier in self._tiers
        )

    def tiers_with(self, key: ChunkKey) -> tuple[str, ...]:
        """The lower tiers that are known to have a chunk."""
        return tuple(tier.name for tier in self._tiers if tier.has(key))

    def close(self) -> None:
        """Stop the threads of all tiers."""
        for tier in self._tiers:
            tier.ranks.close()

    def check_invariants(self) -> None:
        """Assert that what is under way and what host memory holds agree."""
        self.host.check_invariants()
        assert self.host.num_arriving >= len(self._promotions)

    def _take(self, tier: LowerTier, report: TierReport, draft: ChangesDraft) -> None:
        if not report.released:
            draft.faults.extend(fault for fault in tier.judge(report) if self._is_news(fault))
        outrun = self._outrun(tier, report)
        self._doubtful.update((tier.name, key) for key in outrun)
        if report.verb is Verb.WRITE:  # what a late one has done, nobody has said
            self._doubtful.update((tier.name, key) for key in report.released)
        draft.note_presence(tier.name, report.outcome.done, _not_there(report) - outrun)
        if report.verb is Verb.FIND:
            self._answered(tier, report)
            draft.found.extend((tier.name, key) for key in report.outcome.done)
        else:
            self._moved(tier, report, draft)

    def _moved(self, tier: LowerTier, report: TierReport, draft: ChangesDraft) -> None:
        """A read or a write has ended."""
        is_read = report.verb is Verb.READ
        sizes = (self._promotions if is_read else self._demotions).ended(tier, report)
        (draft.arrived if is_read else draft.written).extend((tier.name, key) for key in sizes)
        if sizes:
            total = sum(sizes.values())
            draft.moved.append(Moved(tier.name, report.verb, total, report.seconds))

    def _ask_if_settled(self, tier: LowerTier) -> None:
        """Ask a tier about chunks that are in doubt, once nothing writes them any more."""
        settled = [
            key
            for name, key in self._doubtful
            if name == tier.name and not self._demotions.is_writing(tier, key)
        ]
        if len(self._doubtful) > _MOST_REPORTED:  # of a tier that is broken for long
            self._doubtful.clear()
        if settled and tier.breaker.allows():
            self._doubtful -= {(tier.name, key) for key in settled}
            self._checking |= {(tier.name, key) for key in settled}
            tier.known.asked(settled)
            tier.find(settled, Deadline(self._clock() + _CHECK_S))
            self._num_asking += 1

    def _answered(self, tier: LowerTier, report: TierReport) -> None:
        if report.released:  # a question came back late: it was counted when time ran out
            return
        self._num_asking -= 1
        still = {(tier.name, key) for key in report.outcome.failed} & self._checking
        answered = {(tier.name, key) for key in (*report.outcome.done, *report.outcome.absent)}
        self._checking -= answered | still
        self._doubtful |= still
        tier.known.found(report.outcome.done)
        tier.known.missed(report.outcome.absent - self._outrun(tier, report))
        tier.known.unanswered(report.outcome.failed)

    @staticmethod
    def _outrun(tier: LowerTier, report: TierReport) -> set[ChunkKey]:
        """Chunks that a question did not find, and that were written while it was under way."""
        if report.verb is not Verb.FIND:
            return set()
        return {key for key in report.outcome.absent if tier.has(key)}

    def _is_news(self, fault: Fault) -> bool:
        if not isinstance(fault.error, ChunkCorrupt):
            return True
        marks = {(fault.tier, key) for key in fault.error.keys}
        is_news = not marks <= self._reported
        if len(self._reported) > _MOST_REPORTED:
            self._reported = set()
        self._reported |= marks
        return is_news


def _not_there(report: TierReport) -> set[ChunkKey]:
    """The chunks that a read or a question found missing or bad."""
    failed = report.outcome.failed
    bad = {key for key, error in failed.items() if isinstance(error, ChunkCorrupt)}
    return bad | report.outcome.absent
