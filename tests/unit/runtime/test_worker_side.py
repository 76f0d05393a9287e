"""One rank's half: how the end of a load counts, and that everything is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.runtime.messages import StepMessage, decode_report, encode
from kvstrata.runtime.worker_side import RankMemory, WorkerSide
from kvstrata.tiers.room import Extent
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob, CopyReport

if TYPE_CHECKING:
    from collections.abc import Sequence


class Moved:
    """Copies that are done at once; closes like a GPU that has failed."""

    def __init__(self) -> None:
        self._reports: list[CopyReport] = []

    def submit(self, jobs: Sequence[CopyJob]) -> None:
        self._reports += [CopyReport(job.job_id, frozenset(), 7, 0.5) for job in jobs]

    def take_reports(self) -> list[CopyReport]:
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        raise RuntimeError("the device is gone")


class Closed:
    """Something that is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def take_reports(self) -> list[Any]:
        return []

    def take_evicted(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.is_closed = True


def a_job(job_id: int, request_id: str | None) -> CopyJob:
    key = ChunkKey(bytes([job_id]))
    return CopyJob(job_id, (ChunkCopy(key, GroupId(0), (Extent(0, 1),), 7, (1,)),), request_id)


@pytest.fixture
def arena() -> Closed:
    return Closed()


@pytest.fixture
def tier() -> Closed:
    return Closed()


@pytest.fixture
def side(arena: Closed, tier: Closed) -> WorkerSide:
    memory = RankMemory(cast("Any", arena), Moved(), [cast("Any", tier)])
    side = WorkerSide(0, lambda *_: memory)
    side.register_caches(cast("Any", None), {}, 1)
    return side


def test_a_load_that_brings_what_cannot_be_used_has_failed(side: WorkerSide) -> None:
    jobs = (a_job(1, "spoiled"), a_job(2, "good"), a_job(3, None))
    side.start_step(encode(StepMessage(copies=jobs)))
    side.start_stores()
    report = decode_report(side.report({"spoiled"}))
    ended = side.take_ended_loads()

    assert report is not None
    assert {r.job_id: (r.failed, r.num_bytes) for r in report.copy_reports} == {
        1: (frozenset({ChunkKey(b"\x01")}), 0),
        2: (frozenset(), 7),
        3: (frozenset(), 7),
    }
    assert ended.failed == frozenset({"spoiled"})
    assert ended.done == frozenset({"good"})


def test_all_is_closed_though_a_device_fails(side: WorkerSide, arena: Closed, tier: Closed) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        side.close()

    assert arena.is_closed
    assert tier.is_closed
