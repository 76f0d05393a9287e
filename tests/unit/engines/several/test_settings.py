from __future__ import annotations

from typing import Any

import pytest

from kvstrata.engines.several.settings import ChildSettings, read_children
from kvstrata.errors import ConfigError

KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config")


def read(*entries: object) -> list[ChildSettings]:
    return read_children({"connectors": list(entries)}, KEYS)


def a(kind: str = "A", **changes: object) -> dict[str, object]:
    return {"kv_connector": kind, **changes}


def test_a_child_has_defaults_and_keeps_the_engines_keys() -> None:
    [child] = read(a(kv_role="kv_both"))
    assert child == ChildSettings(
        "connectors[0]", "A", 1.0, 1.0, {"kv_connector": "A", "kv_role": "kv_both"}
    )


def test_a_child_says_what_it_is_worth() -> None:
    [child] = read(a(name="near", load_weight=2, match_deadline="250ms"))
    assert (child.name, child.load_weight, child.match_deadline_s) == ("near", 2.0, 0.25)


def test_no_waiting_needs_no_unit() -> None:
    assert read(a(match_deadline=0))[0].match_deadline_s == 0


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([a("A"), a("B")], ["A", "B"]),
        ([a("A"), a("B"), a("A")], ["A#1", "B", "A#2"]),
        ([a("A", name="x"), a("A")], ["x", "A"]),
        ([a("A", name="A"), a("A")], ["A", "A#1"]),
        ([a("A", name="A#1"), a("A"), a("A")], ["A#1", "A#2", "A#3"]),
    ],
)
def test_names_are_unique(entries: list[Any], names: list[str]) -> None:
    assert [child.name for child in read(*entries)] == names


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"connectors: it is None; accepted: a list"),
        ({"connectors": []}, r"connectors: it is \[\]"),
        ({"connectors": {"kv_connector": "A"}}, r"connectors: .*accepted: a list"),
        ({"connectors": [a()], "conectors": 1}, r"conectors: unknown key.*did you mean 'connectors'"),
        ({"connectors": ["A"]}, r"connectors\[0\]: it is 'A'; accepted: a mapping"),
        ({"connectors": [a(), {"name": "x"}]}, r"connectors\[1\]\.kv_connector: it is None"),
        ({"connectors": [a(load_wait=1)]}, r"connectors\[0\]\.load_wait: unknown key.*load_weight"),
        ({"connectors": [a(zzz=1)]}, r"connectors\[0\]\.zzz: unknown key; accepted: known here: kv_c"),
        ({"connectors": [a(load_weight=0)]}, r"connectors\[0\]\.load_weight: it is 0; accepted: a number"),
        ({"connectors": [a(load_weight=True)]}, r"load_weight: it is True"),
        ({"connectors": [a(load_weight="2")]}, r"load_weight: it is '2'"),
        ({"connectors": [a(load_weight=float("inf"))]}, r"load_weight: it is inf"),
        ({"connectors": [a(match_deadline=5)]}, r"connectors\[0\]\.match_deadline: '?5'? is not a time"),
        ({"connectors": [a(match_deadline="soon")]}, r"match_deadline: 'soon' is not understood"),
        ({"connectors": [a(name="")]}, r"connectors\[0\]\.name: it is ''; accepted: text"),
        ({"connectors": [a(name="x"), a(name="x")]}, r"connectors\[1\]\.name: 'x' is the name of connectors\[0\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_is_accepted(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_children(extra, KEYS)
