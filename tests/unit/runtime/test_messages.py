"""Whatever the halves send each other arrives as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata import errors
from kvstrata.core.chunk_label import ChunkLabel
from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.core.layout import GroupKind
from kvstrata.core.outcomes import Deadline, TierOutcome
from kvstrata.core.spans import TokenSpan
from kvstrata.hierarchy.ranks import Placed
from kvstrata.hierarchy.task_queue import Verb
from kvstrata.hierarchy.tier_io import IOReport
from kvstrata.runtime.message_channel import MessageChannel, Outbox
from kvstrata.runtime.messages import (
    RankReport,
    StepMessage,
    TierReportMessage,
    decode_report,
    decode_step,
    encode,
)
from kvstrata.testing.chunks import a_label
from kvstrata.tiers.room import Extent
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob, CopyReport

COUNTS = st.integers(0, 2**40)
KEYS = st.binary(min_size=32, max_size=32).flatmap(
    lambda digest: st.integers(0, 300).map(
        lambda group: chunk_key(BlockHash(digest), GroupId(group))
    )
)
KEY_SETS = st.frozensets(KEYS, max_size=5)
SECONDS = st.floats(0, 1e6)
EXTENTS = st.lists(st.builds(Extent, COUNTS, COUNTS), max_size=4).map(tuple)
KINDS = (
    errors.TierError,
    errors.TierUnavailable,
    errors.TierTimeout,
    errors.TierFull,
    errors.ChunkCorrupt,
)
ERRORS = st.builds(
    lambda kind, tier, problem, keys: kind(tier, problem, keys),
    st.sampled_from(KINDS),
    st.text(max_size=10),
    st.text(max_size=30),
    st.lists(KEYS, max_size=3),
)


@st.composite
def labels(draw: st.DrawFn) -> ChunkLabel:
    start = draw(COUNTS)
    return ChunkLabel(
        draw(KEYS),
        draw(st.sampled_from(GroupKind)),
        draw(st.integers(1, 4096)),
        TokenSpan(start, start + draw(st.integers(1, 4096))),
        BlockHash(draw(st.just(b"") | st.binary(min_size=32, max_size=32))),
        draw(COUNTS),
    )


@st.composite
def reports(draw: st.DrawFn) -> IOReport:
    done, absent = draw(KEY_SETS), draw(KEY_SETS)
    some = draw(st.lists(ERRORS, min_size=1, max_size=3))
    failed = {key: draw(st.sampled_from(some)) for key in draw(KEY_SETS)}
    return IOReport(
        draw(COUNTS),
        TierOutcome(done, absent, failed),
        draw(KEY_SETS),
        draw(KEY_SETS),
        draw(KEY_SETS),
        draw(SECONDS),
        draw(SECONDS),
    )


def plain(error: errors.TierError) -> tuple[object, ...]:
    return type(error), error.tier, error.problem, error.keys, str(error)


@given(reports(), st.integers(0, 10))
def test_a_tiers_report_with_its_errors(report: IOReport, tier: int) -> None:
    sent = RankReport(tier_reports=(TierReportMessage.of(tier, report),))
    [arrived] = decode_report(encode(sent)).tier_reports
    found = arrived.read()

    assert arrived.tier == tier
    assert found._replace(outcome=TierOutcome()) == report._replace(outcome=TierOutcome())
    assert found.outcome.done == report.outcome.done
    assert found.outcome.absent == report.outcome.absent
    assert {k: plain(e) for k, e in found.outcome.failed.items()} == {
        k: plain(e) for k, e in report.outcome.failed.items()
    }


def test_an_error_that_concerned_many_chunks_is_one_error_again() -> None:
    error = errors.TierTimeout("disk", "no answer", [b"a" * 34])
    keys = [ChunkKey(bytes([n]) * 34) for n in range(20)]
    nothing: frozenset[ChunkKey] = frozenset()
    report = IOReport(1, TierOutcome.all_failed(keys, error), nothing, nothing, nothing, 0.0, 0.0)
    message = TierReportMessage.of(0, report)

    assert len(message.faults) == 1
    assert len({id(fault) for fault in message.read().outcome.failed.values()}) == 1


def test_an_error_of_a_kind_that_is_not_known_is_a_tiers_error_still() -> None:
    class Strange(errors.TierError):
        pass

    nothing: frozenset[ChunkKey] = frozenset()
    failed = TierOutcome.all_failed([ChunkKey(b"k" * 34)], Strange("disk", "odd"))
    message = TierReportMessage.of(0, IOReport(1, failed, nothing, nothing, nothing, 0.0, 0.0))
    [error] = message.read().outcome.failed.values()

    assert plain(error)[:3] == (errors.TierError, "disk", "odd")


@given(
    COUNTS,
    st.none() | st.text(),
    st.lists(
        st.builds(
            ChunkCopy,
            KEYS,
            st.integers(0, 9).map(GroupId),
            EXTENTS,
            COUNTS,
            st.lists(COUNTS, max_size=6).map(tuple),
            COUNTS,
        ),
        max_size=4,
    ).map(tuple),
)
def test_copies(job_id: int, waiting: str | None, chunks: tuple[ChunkCopy, ...]) -> None:
    job = CopyJob(job_id, chunks, waiting)
    [arrived] = decode_step(encode(StepMessage(copies=(job,)))).copies

    assert arrived == job
    assert arrived.is_load == job.is_load
    assert [chunk.extents for chunk in arrived.chunks] == [chunk.extents for chunk in chunks]
    assert all(isinstance(e, Extent) for chunk in arrived.chunks for e in chunk.extents)


@given(COUNTS, KEY_SETS, COUNTS, SECONDS)
def test_reports_of_copies(
    job_id: int, failed: frozenset[ChunkKey], num_bytes: int, seconds: float
) -> None:
    report = CopyReport(job_id, failed, num_bytes, seconds)

    assert decode_report(encode(RankReport(copy_reports=(report,)))).copy_reports == (report,)


@given(st.lists(st.builds(Placed, labels(), EXTENTS), max_size=4))
def test_chunks_with_their_places(chunks: list[Placed]) -> None:
    outbox = Outbox(lambda: 100.0)
    MessageChannel(outbox, tier=3, rank=0).move(7, Verb.WRITE, chunks, Deadline(130.0))
    [job] = decode_step(encode(StepMessage(outbox.take()))).tier_jobs

    assert [chunk.read() for chunk in job.chunks] == chunks
    assert (job.tier, job.job_id, Verb(job.verb)) == (3, 7, Verb.WRITE)
    assert job.seconds_left == pytest.approx(30.0), "clocks of other hosts differ"


class TestChannels:
    def test_all_ranks_get_one_message(self) -> None:
        outbox = Outbox(lambda: 0.0)
        channels = [MessageChannel(outbox, 0, rank) for rank in range(3)]
        for channel in channels:
            channel.move(1, Verb.READ, [Placed(a_label(1), ())], Deadline(1.0))

        assert len(outbox.take()) == 1
        assert len(outbox) == 0

    def test_a_question_is_the_first_ranks(self) -> None:
        outbox = Outbox(lambda: 0.0)
        keys = [a_label(n).key for n in range(3)]
        MessageChannel(outbox, 0, rank=0).find(5, keys, Deadline(1.0))
        [job] = outbox.take()

        assert (job.keys, job.chunks, Verb(job.verb)) == (tuple(keys), (), Verb.FIND)

    def test_reports_are_handed_over_once(self) -> None:
        channel = MessageChannel(Outbox(lambda: 0.0), 0, 1)
        nothing: frozenset[ChunkKey] = frozenset()
        report = IOReport(1, TierOutcome(), nothing, nothing, nothing, 0.0, 0.0)
        channel.deliver(report)

        assert channel.take_reports() == [report]
        assert channel.take_reports() == []
