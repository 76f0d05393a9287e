from __future__ import annotations

import pickle

from kvstrata.engines.several.loads import Load, Loads, Orders, RankLoads
from kvstrata.runtime.seam import EndedLoads


def a_load(child: str | None = "a", *blocks: int) -> Load:
    return Load(child, 32, frozenset(blocks))


def ended(done: str = "", failed: str = "") -> EndedLoads:
    return EndedLoads(frozenset(done), frozenset(failed))


def rank_with(orders: Orders) -> RankLoads:
    loads = RankLoads()
    loads.begin(orders)
    return loads


# --- beside the scheduler ---------------------------------------------------------------------


def test_ranks_hear_of_a_load_once_and_it_lasts_until_it_is_reported() -> None:
    loads = Loads()
    loads.start("r", a_load())
    assert loads.take_orders({"a"}) == Orders({"r": a_load()})
    assert loads.take_orders({"a"}) == Orders()
    assert "r" in loads
    assert (loads.num_pending("a"), loads.num_pending("b")) == (1, 0)
    assert loads.end(["r", "stranger"]) == {"r": a_load()}
    assert "r" not in loads


def test_a_load_of_a_child_that_ranks_do_not_hear_of_is_lost() -> None:
    loads = Loads()
    loads.start("r", a_load("a"))
    loads.start("s", a_load(None))
    loads.start("t", a_load("b"))
    orders = loads.take_orders({"b"})
    assert orders.lost == ("r", "s")
    assert orders.started == {"t": a_load("b")}
    assert "r" in loads  # the request waits until every rank has reported it


def test_a_load_within_a_step_is_not_waited_for() -> None:
    loads = Loads()
    loads.start_in_step(a_load("a", 1))
    loads.start_in_step(a_load("b", 2))
    orders = loads.take_orders({"a"})
    assert orders.in_step == (a_load("a", 1), a_load(None, 2))
    assert loads.take_orders({"a"}).in_step == ()


def test_orders_travel() -> None:
    orders = Orders({"r": a_load("a", 1)}, ("s",), (a_load("a", 2),))
    assert pickle.loads(pickle.dumps(orders)) == orders  # noqa: S301 - our own


# --- beside a rank ----------------------------------------------------------------------------


def test_a_load_ends_once_by_the_one_that_was_asked() -> None:
    rank = rank_with(Orders({"r": a_load("a")}))
    assert rank.report("b", ["r"], []) == 1
    assert rank.take_ended(()) == ended()
    assert rank.report("a", ["r"], []) == 0
    assert rank.take_ended(()) == ended(done="r")
    assert rank.report("a", ["r"], []) == 1
    assert rank.take_ended(()) == ended()


def test_a_failure_is_reported_with_the_end() -> None:
    rank = rank_with(Orders({"r": a_load("a"), "s": a_load("a")}))
    assert rank.report("a", ["r", "s"], ["s"]) == 0
    assert rank.take_ended(()) == ended(done="r", failed="s")


def test_lost_loads_fail_at_once() -> None:
    assert rank_with(Orders(lost=("r",))).take_ended(()) == ended(failed="r")


def test_loads_of_a_closed_child_fail_unless_they_were_done_before() -> None:
    rank = rank_with(Orders({"r": a_load("a"), "s": a_load("a"), "t": a_load("b")}))
    rank.report("a", ["r"], [])
    assert rank.has("a")
    assert rank.take_ended({"a"}) == ended(done="r", failed="s")
    assert not rank.has("a")
    assert rank.has("b")


def test_blocks_that_did_not_arrive_fail_their_load_when_it_ends() -> None:
    rank = rank_with(Orders({"r": a_load("a", 1, 2), "s": a_load("a", 3), "t": a_load("b", 4)}))
    assert rank.report_blocks("a", [2, 4, 9]) == 2  # 4 is another's, 9 is nobody's
    assert rank.take_ended(()) == ended()
    rank.report("a", ["r", "s"], [])
    assert rank.take_ended(()) == ended(done="s", failed="r")


def test_blocks_of_a_step_that_nobody_filled_are_told_in_that_step() -> None:
    rank = rank_with(Orders(in_step=(a_load("a", 1), a_load("b", 2), a_load(None, 3))))
    assert rank.unfilled_blocks(()) == {3}
    assert rank.unfilled_blocks({"a"}) == {1, 3}
    rank.begin(Orders())
    assert rank.unfilled_blocks({"a"}) == set()
