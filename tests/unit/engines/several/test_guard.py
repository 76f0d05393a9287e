from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from .children import a_child

if TYPE_CHECKING:
    import pytest


def fails(_: object) -> NoReturn:
    raise RuntimeError("on purpose")


def test_an_answer_passes_through() -> None:
    child = a_child(connector="abc")
    assert child.use("len", len, 0) == 3
    assert child.is_active


def test_a_child_that_raises_is_stopped_and_the_other_answer_stands_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = a_child(connector="abc")
    with caplog.at_level(logging.ERROR):
        assert child.use("hook", fails, 7) == 7
        assert child.use("len", len, 0) == 0
    assert not child.is_active
    assert child.tally.faults == 1
    assert "connector a is not used any more: hook" in caplog.text


def test_a_stopped_child_still_settles_and_its_faults_are_counted_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = a_child(connector="abc")
    child.fail("worker half", "it broke")
    assert child.settle("len", len, 0) == 3
    caplog.clear()
    assert child.settle("hook", fails, None) is None
    assert child.tally.faults == 2
    assert not caplog.records


def test_a_warning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    child = a_child()
    for text in ("this", "this", "that"):
        child.say_once(text)
    assert [record.getMessage() for record in caplog.records] == [
        "connector a: this",
        "connector a: that",
    ]


def test_stats_are_what_was_counted() -> None:
    child = a_child()
    child.tally.add_query(16)
    child.fail("hook", "fault")
    stats = child.stats(pending_loads=2)
    assert (stats.queries, stats.hit_tokens, stats.pending_loads) == (1, 16, 2)
    assert stats.is_stopped
