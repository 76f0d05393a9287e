"""The children's counts as plain data, which any process can add up.

    {"near": {"connector": "module:Class", "counts": {"queries": 2}, "stats": {...}}}

Counts are increments, except those that say what is now; `stats` is the child's own payload.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata.runtime.multi_child import ChildStats

Entry = dict[str, Any]

_NOW: Final = ("pending_loads", "is_stopped")
"""Counts that are not added up: the latest is right."""


def counts_since(before: ChildStats, after: ChildStats) -> dict[str, int]:
    """What has changed."""
    old, new = asdict(before), asdict(after)
    return {
        name: int(value) if name in _NOW else value - old[name]
        for name, value in new.items()
        if value != old[name]
    }


def entry_of(connector: str, counts: Mapping[str, int], stats: Mapping[str, Any] | None) -> Entry:
    """One child's part; empty: there is nothing to say.

    Args:
        connector: where the class is found, as `module:Class`.
        counts: what the multi connector counted.
        stats: what the child itself has to say.
    """
    entry: Entry = {}
    if counts:
        entry["counts"] = dict(counts)
    if stats:
        entry["stats"] = stats
    return {"connector": connector, **entry} if entry else entry


def add_entry(
    earlier: Mapping[str, Any],
    later: Mapping[str, Any],
    combine: Callable[[str, Any, Any], Any],
) -> Entry:
    """Two parts of one child as one.

    Args:
        earlier: one.
        later: the other.
        combine: adds up two of the child's own payloads; given where its class is found.
    """
    counts = _added(earlier.get("counts", {}), later.get("counts", {}))
    stats = [part["stats"] for part in (earlier, later) if "stats" in part]
    connector = str(later["connector"])
    both = combine(connector, stats[0], stats[1]) if len(stats) > 1 else next(iter(stats), None)
    return entry_of(connector, counts, both)


def _added(earlier: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    added = dict(earlier)
    for name, value in later.items():
        added[name] = value if name in _NOW else added.get(name, 0) + value
    return added
