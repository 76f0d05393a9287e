"""One outcome when every rank has reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.transfers.copy_queue import CopyReport

if TYPE_CHECKING:
    from kvstrata.core.ids import ChunkKey


class RankQuorum:
    """Counts the ranks' reports of copies.

    Job numbers are never used again, so a late report of a job that nobody knows is dropped.

    Ownership: scheduler thread only.

    Args:
        num_ranks: how many must report.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reports: dict[int, dict[int, CopyReport]] = {}

    def __len__(self) -> int:
        return len(self._reports)

    def expect(self, job_id: int) -> None:
        """A job has been sent to all ranks."""
        self._reports[job_id] = {}

    def count(self, rank: int, report: CopyReport) -> CopyReport | None:
        """Take one rank's report; the outcome over all ranks when it was the last.

        Bytes and seconds are those of one rank, as ranks copy at the same time.
        """
        reports = self._reports.get(report.job_id)
        if reports is None:
            return None
        reports[rank] = report
        if len(reports) < self._num_ranks:
            return None
        del self._reports[report.job_id]
        if self._num_ranks == 1:
            return report
        failed: frozenset[ChunkKey] = frozenset().union(*(r.failed for r in reports.values()))
        return CopyReport(
            report.job_id,
            failed,
            max(r.num_bytes for r in reports.values()),
            max(r.seconds for r in reports.values()),
        )
