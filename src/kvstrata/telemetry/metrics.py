"""Every metric in one table, and counters that travel as plain data.

Whoever counts adds to `Counters`; a snapshot is a list of numbers with labels that any process can
add up and hand to Prometheus. There are no global objects.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Metric(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


def _counter(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"kvstrata_{name}_total", "counter", labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"kvstrata_{name}", "gauge", labels, text)


LOOKUPS: Final = _counter("lookups", (), "Requests that were looked up, each once.")
LOOKUP_TOKENS: Final = _counter("lookup_tokens", (), "Tokens of their prompts.")
HIT_TOKENS: Final = _counter("hit_tokens", ("tier",), "Tokens of prompts loaded, by tier.")
MISS_TOKENS: Final = _counter("miss_tokens", (), "Tokens neither on the device nor loaded.")
PROMPT_TOKENS: Final = _counter("prompt_tokens", ("source",), "Tokens of prompts, by source.")
OBSTACLES: Final = _counter("obstacles", ("group",), "Hits that a group made shorter.")
DEADLINE_MISSES: Final = _counter("deadline_misses", (), "Waits that were cut off.")
LOADS_FAILED: Final = _counter("failed_loads", (), "Loads that did not bring their chunks.")
LOAD_BYTES: Final = _counter("load_bytes", ("group",), "Bytes copied to the device, per rank.")
LOAD_SECONDS: Final = _counter("load_seconds", (), "Time of those copies.")
STORE_BYTES: Final = _counter("store_bytes", ("group",), "Bytes copied from the device, per rank.")
STORE_SECONDS: Final = _counter("store_seconds", (), "Time of those copies.")
STORES_REFUSED: Final = _counter("refused_stores", (), "Chunks that found no room.")
READ_BYTES: Final = _counter("read_bytes", ("tier",), "Bytes read from a lower tier, per rank.")
READ_SECONDS: Final = _counter("read_seconds", ("tier",), "Time of those reads.")
WRITE_BYTES: Final = _counter("write_bytes", ("tier",), "Bytes written to a lower tier, per rank.")
WRITE_SECONDS: Final = _counter("write_seconds", ("tier",), "Time of those writes.")
WRITES_DROPPED: Final = _counter("dropped_writes", ("tier",), "Writes not taken: too many waited.")
EVICTIONS: Final = _counter("evictions", ("tier",), "Chunks that left to make room.")
TIER_FAULTS: Final = _counter("tier_faults", ("tier", "kind"), "Faults of a tier, by kind.")
HOOK_FAULTS: Final = _counter("hook_faults", ("hook",), "Exceptions kept from the engine.")
PENDING: Final = _gauge("pending", ("what",), "Jobs under way.")
HOST_BYTES: Final = _gauge("host_bytes", ("state",), "Host memory of each rank.")
CHILD_QUERIES: Final = _counter("child_queries", ("child",), "Questions to a connector's child.")
CHILD_HITS: Final = _counter("child_hits", ("child",), "Times that a child offered tokens.")
CHILD_HIT_TOKENS: Final = _counter("child_hit_tokens", ("child",), "Tokens that it offered.")
CHILD_MISSES: Final = _counter("child_misses", ("child",), "Times that a child had nothing.")
CHILD_PENDING: Final = _gauge("child_pending_loads", ("child",), "Loads of a child under way.")

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""The table."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One number with its labels, in the order of the metric's."""

    name: str
    labels: tuple[str, ...]
    value: float


class Counters:
    """Numbers by metric and labels. Belongs to one thread."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)

    def add(self, metric: Metric, value: float, *labels: object) -> None:
        """Count; a counter never goes down."""
        assert len(labels) == len(metric.labels), metric.name
        assert value >= 0 or metric.kind == "gauge", metric.name
        self._values[metric.name, tuple(map(str, labels))] += value

    def set(self, metric: Metric, value: float, *labels: object) -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        assert len(labels) == len(metric.labels), metric.name
        self._values[metric.name, tuple(map(str, labels))] = float(value)

    def value(self, metric: Metric, *labels: object) -> float:
        """One number; 0 if it was never counted."""
        return self._values.get((metric.name, tuple(map(str, labels))), 0.0)

    def total(self, metric: Metric) -> float:
        """A metric's sum over all labels."""
        return sum(value for (name, _), value in self._values.items() if name == metric.name)

    def snapshot(self) -> list[Sample]:
        """All numbers, as data."""
        return [Sample(name, labels, value) for (name, labels), value in self._values.items()]


def increments(before: Iterable[Sample], after: Iterable[Sample]) -> list[Sample]:
    """What was counted between two snapshots; gauges as they are now."""
    old = {(sample.name, sample.labels): sample.value for sample in before}
    kinds: Mapping[str, str] = {metric.name: metric.kind for metric in METRICS}
    return [
        sample
        if kinds[sample.name] == "gauge"
        else Sample(
            sample.name, sample.labels, sample.value - old.get((sample.name, sample.labels), 0.0)
        )
        for sample in after
    ]
