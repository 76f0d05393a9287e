"""Numbers of several connectors: their own, and what is counted about them, apart by name.

A payload names each child's class, so that any process builds the child's own stats with it; vLLM's
registry knows its own connectors alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvstrata.engines.several.payload import add_entry

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


class MultiStats(KVConnectorStats):
    """Numbers by child, as plain data; see `several.payload`."""

    def aggregate(self, other: KVConnectorStats) -> MultiStats:
        """Add up."""
        for name, entry in other.data.items():
            mine = self.data.get(name)
            self.data[name] = entry if mine is None else add_entry(mine, entry, _combined)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line in the log: every number, with the child's name before its own."""
        return {
            f"{name}.{key}": value
            for name, entry in self.data.items()
            for key, value in {**entry.get("counts", {}), **_reduced(entry)}.items()
        }

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


def plain_stats(stats: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any KVConnectorStats
    """A child's stats as they travel; None: there is nothing to say, or it cannot travel.

    vLLM's engine would end on a payload that cannot.
    """
    if stats is None or stats.is_empty():
        return None
    said = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    try:
        plain: dict[str, Any] = msgspec.to_builtins(said, enc_hook=_number)
    except (TypeError, ValueError):
        _say_once(type(stats).__name__)
        return None
    return plain


def _number(value: object) -> int | float:
    """A number that has a class of its own."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no number")


def _combined(class_path: str, earlier: Any, later: Any) -> Any:  # noqa: ANN401 - plain data
    """Two payloads of a child as one; the later one alone if its class does not say how."""
    try:
        first, second = _built(class_path, earlier), _built(class_path, later)
        return later if first is None else plain_stats(first.aggregate(second))
    except Exception:  # noqa: BLE001 - numbers are not worth an engine
        _say_once(class_path)
        return later


def _reduced(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "stats" not in entry:
        return {}
    try:
        stats = _built(entry["connector"], entry["stats"])
        return {} if stats is None else dict(stats.reduce())
    except Exception:  # noqa: BLE001 - the same
        _say_once(entry["connector"])
        return {}


def _built(class_path: str, data: Any) -> Any:  # noqa: ANN401 - plain data to a KVConnectorStats
    return _resolve(class_path).build_kv_connector_stats(data=data)


@functools.cache
def _resolve(class_path: str) -> Any:  # noqa: ANN401 - a connector's class
    module, _, name = class_path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _say_once(name: str) -> None:
    _log.warning("%s: its stats cannot be used", name, exc_info=True)
