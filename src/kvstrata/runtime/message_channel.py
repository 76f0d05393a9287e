"""Ranks of other processes, as the hierarchy sees them.

Jobs go out with the next step's message, reports come in with its answer.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.hierarchy.task_queue import Verb
from kvstrata.runtime.messages import PlacedMessage, TierJobMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline
    from kvstrata.hierarchy.ranks import Placed
    from kvstrata.hierarchy.tier_io import IOReport


class Outbox:
    """The jobs of all tiers that have not been sent yet.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: list[TierJobMessage] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def put(
        self,
        tier: int,
        job_id: int,
        verb: Verb,
        deadline: Deadline,
        *,
        chunks: Sequence[Placed] = (),
        keys: Sequence[ChunkKey] = (),
    ) -> None:
        """Add a job for all ranks."""
        left = deadline - self._clock()
        placed = tuple(map(PlacedMessage.of, chunks))
        self._jobs.append(TierJobMessage(tier, job_id, verb, placed, tuple(keys), left))

    def take(self) -> tuple[TierJobMessage, ...]:
        """Hand over what is to be sent."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs


class MessageChannel:
    """The way to one rank's traffic with one tier.

    All ranks get the same message, so the first rank's channel alone puts jobs into it.

    Args:
        outbox: where jobs go.
        tier: the tier's position in the configuration.
        rank: which rank.
    """

    def __init__(self, outbox: Outbox, tier: int, rank: int) -> None:
        self._outbox = outbox
        self._tier = tier
        self._is_first = rank == 0
        self._reports: list[IOReport] = []

    def move(self, job_id: int, verb: Verb, chunks: Sequence[Placed], deadline: Deadline) -> None:
        """Have the rank read or write with the next step."""
        if self._is_first:
            self._outbox.put(self._tier, job_id, verb, deadline, chunks=chunks)

    def find(self, job_id: int, keys: Sequence[ChunkKey], deadline: Deadline) -> None:
        """Have the rank ask with the next step."""
        assert self._is_first, "one rank tells for all"
        self._outbox.put(self._tier, job_id, Verb.FIND, deadline, keys=keys)

    def deliver(self, report: IOReport) -> None:
        """Take in what the rank has said."""
        self._reports.append(report)

    def take_reports(self) -> list[IOReport]:
        """Hand over what the rank has said."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """The rank ends by itself."""
