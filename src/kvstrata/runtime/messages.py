"""What the two halves send each other, once in every step.

Scheduler half to every rank: jobs for the tiers below, copies between device and arena. Rank to
scheduler half: how they ended. Times travel as seconds left, because clocks of other hosts differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstrata import errors
from kvstrata.core.chunk_label import ChunkLabel
from kvstrata.core.ids import BlockHash, ChunkKey
from kvstrata.core.layout import GroupKind
from kvstrata.core.outcomes import TierOutcome
from kvstrata.core.spans import TokenSpan
from kvstrata.errors import TierError
from kvstrata.hierarchy.ranks import Placed
from kvstrata.hierarchy.tier_io import IOReport
from kvstrata.tiers.room import Extent
from kvstrata.transfers.copy_queue import CopyJob, CopyReport

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Compact on the wire: fields by position."""


class PlacedMessage(_Message, frozen=True, array_like=True):
    """A chunk and its place in the arenas."""

    key: bytes
    kind: str
    block_tokens: int
    start: int
    stop: int
    parent: bytes
    payload_bytes: int
    extents: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, placed: Placed) -> PlacedMessage:
        """Ready to be sent."""
        label = placed.label
        return cls(
            label.key,
            label.kind,
            label.block_tokens,
            label.tokens.start,
            label.tokens.stop,
            label.parent,
            label.payload_bytes,
            placed.extents,
        )

    def read(self) -> Placed:
        """As it was before."""
        label = ChunkLabel(
            ChunkKey(self.key),
            GroupKind(self.kind),
            self.block_tokens,
            TokenSpan(self.start, self.stop),
            BlockHash(self.parent),
            self.payload_bytes,
        )
        return Placed(label, _extents(self.extents))


class TierJobMessage(_Message, frozen=True, array_like=True):
    """Something to read, write or ask in a lower tier."""

    tier: int
    """Its position in the configuration."""
    job_id: int
    verb: int
    chunks: tuple[PlacedMessage, ...]
    keys: tuple[bytes, ...]
    """For questions, instead of chunks; only the first rank asks."""
    seconds_left: float


class StepMessage(_Message, frozen=True, array_like=True):
    """From the scheduler half to every rank."""

    tier_jobs: tuple[TierJobMessage, ...] = ()
    copies: tuple[CopyJob, ...] = ()
    lost_loads: tuple[str, ...] = ()
    """Requests that wait for a load which cannot be done: ranks report it as failed."""


class FaultMessage(_Message, frozen=True, array_like=True):
    """An error of a tier."""

    kind: str
    tier: str
    problem: str
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, error: TierError) -> FaultMessage:
        """Ready to be sent."""
        return cls(type(error).__name__, error.tier, error.problem, error.keys)

    def read(self) -> TierError:
        """As it was before."""
        return _FAULTS.get(self.kind, TierError)(self.tier, self.problem, self.keys)


class TierReportMessage(_Message, frozen=True, array_like=True):
    """How a tier job ended on a rank, or what it let go of."""

    tier: int
    job_id: int
    done: tuple[bytes, ...]
    absent: tuple[bytes, ...]
    faults: tuple[tuple[FaultMessage, tuple[bytes, ...]], ...]
    """Each with the keys it concerned."""
    held: tuple[bytes, ...]
    released: tuple[bytes, ...]
    hurried: tuple[bytes, ...]
    slowest_s: float
    seconds: float

    @classmethod
    def of(cls, tier: int, report: IOReport) -> TierReportMessage:
        """Ready to be sent."""
        outcome = report.outcome
        concerned: dict[int, list[bytes]] = {}
        errors_by_id = {id(error): error for error in outcome.failed.values()}
        for key, error in outcome.failed.items():
            concerned.setdefault(id(error), []).append(key)
        return cls(
            tier,
            report.job_id,
            tuple(outcome.done),
            tuple(outcome.absent),
            tuple((FaultMessage.of(errors_by_id[i]), tuple(k)) for i, k in concerned.items()),
            tuple(report.held),
            tuple(report.released),
            tuple(report.hurried),
            report.slowest_s,
            report.seconds,
        )

    def read(self) -> IOReport:
        """As it was before."""
        failed: dict[ChunkKey, TierError] = {}
        for fault, keys in self.faults:
            failed |= dict.fromkeys(_keys(keys), fault.read())
        return IOReport(
            self.job_id,
            TierOutcome(_keys(self.done), _keys(self.absent), failed),
            _keys(self.held),
            _keys(self.released),
            _keys(self.hurried),
            self.slowest_s,
            self.seconds,
        )


class RankReport(_Message, frozen=True, array_like=True):
    """From a rank to the scheduler half."""

    tier_reports: tuple[TierReportMessage, ...] = ()
    copy_reports: tuple[CopyReport, ...] = ()
    evicted: tuple[tuple[bytes, ...], ...] = ()
    """By tier: chunks that it let go of by itself."""


encode: Final = msgspec.msgpack.encode
decode_step: Final = msgspec.msgpack.Decoder(StepMessage).decode
decode_report: Final = msgspec.msgpack.Decoder(RankReport).decode

NO_WORK: Final = encode(StepMessage())
"""The message of a step with nothing to do; most decode steps have none."""
NO_NEWS: Final = encode(RankReport())
"""The report of a step in which nothing has ended."""

_FAULTS: Final[dict[str, type[TierError]]] = {
    kind.__name__: kind
    for kind in (
        errors.TierError,
        errors.TierUnavailable,
        errors.TierTimeout,
        errors.TierFull,
        errors.ChunkCorrupt,
    )
}


def _extents(pairs: Iterable[tuple[int, int]]) -> tuple[Extent, ...]:
    return tuple(Extent(*pair) for pair in pairs)


def _keys(keys: Iterable[bytes]) -> frozenset[ChunkKey]:
    return frozenset(map(ChunkKey, keys))
