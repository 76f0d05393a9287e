from __future__ import annotations

from typing import Any

import msgspec

from kvstrata.engines.several.payload import add_entry, counts_since, entry_of
from kvstrata.runtime.multi_child import ChildStats


def joined(path: str, earlier: Any, later: Any) -> Any:  # noqa: ANN401 - plain data
    return {"path": path, "n": earlier["n"] + later["n"]}


def test_counts_are_increments_and_what_is_now() -> None:
    before = ChildStats(queries=3, hits=1, pending_loads=2)
    after = ChildStats(queries=5, hits=1, pending_loads=0, is_stopped=True)
    assert counts_since(before, after) == {"queries": 2, "pending_loads": 0, "is_stopped": 1}
    assert counts_since(after, after) == {}


def test_a_part_says_where_its_class_is_or_nothing_at_all() -> None:
    assert entry_of("m:C", {}, None) == {}
    assert entry_of("m:C", {"hits": 1}, None) == {"connector": "m:C", "counts": {"hits": 1}}
    assert entry_of("m:C", {}, {"n": 1}) == {"connector": "m:C", "stats": {"n": 1}}


def test_parts_add_up() -> None:
    first = entry_of("m:C", {"hits": 1, "pending_loads": 4}, {"n": 1})
    second = entry_of("m:C", {"hits": 2, "misses": 1, "pending_loads": 0}, {"n": 2})
    assert add_entry(first, second, joined) == {
        "connector": "m:C",
        "counts": {"hits": 3, "misses": 1, "pending_loads": 0},
        "stats": {"path": "m:C", "n": 3},
    }


def test_a_part_without_own_numbers_leaves_the_others() -> None:
    counted, own = entry_of("m:C", {"hits": 1}, None), entry_of("m:C", {}, {"n": 1})
    both = {"connector": "m:C", "counts": {"hits": 1}, "stats": {"n": 1}}
    assert add_entry(counted, own, joined) == add_entry(own, counted, joined) == both
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both)) == both
