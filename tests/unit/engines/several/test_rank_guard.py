from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvstrata.engines.several.rank_guard import DRAIN_S, RankChild

from .children import Clock

if TYPE_CHECKING:
    import pytest


class Connector:
    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.is_stubborn = is_stubborn
        self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        if self.is_stubborn:
            raise RuntimeError("on purpose")


def fails(_: object) -> NoReturn:
    raise RuntimeError("on purpose")


def a_rank_child(*, is_stubborn: bool = False) -> RankChild[Connector]:
    return RankChild("a", Connector(is_stubborn=is_stubborn), Clock())


def test_a_child_that_raises_is_shut_down_once_and_says_why_once() -> None:
    child = a_rank_child()
    assert child.call("hook", fails, 7) == 7
    assert child.call("other", lambda c: c.num_shutdowns, 0) == 0
    child.close()
    assert child.is_closed
    assert not child.is_unclean
    assert child.connector.num_shutdowns == 1
    assert child.take_fault() == "hook: RuntimeError('on purpose')"
    assert child.take_fault() is None


def test_a_child_that_cannot_be_shut_down_is_unclean() -> None:
    child = a_rank_child(is_stubborn=True)
    child.close()
    assert child.is_closed
    assert child.is_unclean


def test_a_stopped_child_has_its_time() -> None:
    clock = Clock()
    child = RankChild("a", Connector(), clock)
    child.drain()
    clock.now_s += DRAIN_S / 2
    child.drain()  # the time runs from the first call
    assert child.call("hook", lambda _: 1, 0) == 1
    assert not child.is_late
    clock.now_s += DRAIN_S / 2
    assert child.is_late


def test_a_closed_child_is_not_drained() -> None:
    child = a_rank_child()
    child.close()
    child.drain()
    assert child.is_closed
    assert not child.is_late


def test_something_wrong_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    child = a_rank_child()
    child.say_once("this")
    child.say_once("this")
    assert [record.getMessage() for record in caplog.records] == ["connector a: this"]
