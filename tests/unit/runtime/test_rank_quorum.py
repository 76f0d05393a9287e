"""One outcome when every rank has reported, and none before, twice, or out of nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.ids import ChunkKey
from kvstrata.runtime.rank_quorum import RankQuorum
from kvstrata.transfers.copy_queue import CopyReport

KEYS = [ChunkKey(bytes([n]) * 34) for n in range(4)]


def a_report(job_id: int = 1, *failed: int, num_bytes: int = 100, seconds: float = 1) -> CopyReport:
    return CopyReport(job_id, frozenset(KEYS[n] for n in failed), num_bytes, seconds)


def test_a_job_has_ended_when_the_last_rank_has_reported() -> None:
    quorum = RankQuorum(3)
    quorum.expect(1)

    assert quorum.count(2, a_report(1, 0, num_bytes=100, seconds=3)) is None
    assert quorum.count(0, a_report(1, num_bytes=300, seconds=1)) is None
    assert len(quorum) == 1
    outcome = quorum.count(1, a_report(1, 2, num_bytes=200, seconds=2))
    assert outcome == CopyReport(1, frozenset({KEYS[0], KEYS[2]}), 300, 3)
    assert len(quorum) == 0


def test_one_rank_that_reports_twice_is_one_rank() -> None:
    quorum = RankQuorum(2)
    quorum.expect(1)

    assert quorum.count(0, a_report()) is None
    assert quorum.count(0, a_report()) is None
    assert quorum.count(1, a_report()) is not None


def test_reports_of_unknown_and_of_ended_jobs_are_dropped() -> None:
    quorum = RankQuorum(1)
    quorum.expect(1)

    assert quorum.count(0, a_report(7)) is None
    assert quorum.count(0, a_report(1)) is not None
    assert quorum.count(0, a_report(1)) is None
    assert len(quorum) == 0


@given(st.integers(1, 4), st.data())
def test_any_order_of_reports_ends_each_job_once(num_ranks: int, data: st.DataObject) -> None:
    quorum = RankQuorum(num_ranks)
    jobs = range(3)
    for job in jobs:
        quorum.expect(job)
    each = [(rank, job) for rank in range(num_ranks) for job in jobs]
    order = data.draw(st.permutations(each + data.draw(st.lists(st.sampled_from(each)))))
    ended = [
        outcome.job_id for rank, job in order if (outcome := quorum.count(rank, a_report(job)))
    ]

    assert sorted(ended) == list(jobs)
