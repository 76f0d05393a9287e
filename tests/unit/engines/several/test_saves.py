from __future__ import annotations

from kvstrata.engines.several.saves import RankSaves, Saves


def test_ranks_hear_once_who_saves() -> None:
    saves = Saves()
    saves.add("r", "a")
    saves.add("r", "b")
    saves.add("r", "a")
    assert "r" in saves
    assert saves.take_unsent() == {"r": ["a", "b"]}
    assert saves.take_unsent() == {}
    assert saves.end(["r", "stranger"]) == {"r": {"a", "b"}}
    assert "r" not in saves


def test_a_request_is_done_with_its_last_saver_and_told_once() -> None:
    rank = RankSaves()
    rank.expect({"r": ["a", "b"]})
    assert rank.report("a", ["r"]) == 0
    assert rank.take_done(()) == set()
    assert rank.report("b", ["r"]) == 0
    assert rank.take_done(()) == {"r"}
    assert rank.take_done(()) == set()


def test_who_was_not_expected_changes_nothing() -> None:
    rank = RankSaves()
    rank.expect({"r": ["a"]})
    assert rank.report("b", ["r"]) == 1
    assert rank.report("a", ["stranger"]) == 1
    assert rank.take_done(()) == set()
    assert rank.report("a", ["r"]) == 0
    assert rank.report("a", ["r"]) == 1
    assert rank.take_done(()) == {"r"}


def test_a_closed_child_is_not_waited_for() -> None:
    rank = RankSaves()
    rank.expect({"r": ["a", "b"], "s": ["a"]})
    assert rank.has("a")
    assert rank.take_done({"a"}) == {"s"}
    rank.report("b", ["r"])
    assert rank.take_done({"a"}) == {"r"}
    assert not rank.has("a")
