"""Snapshots of counters, as Prometheus reads them.

The process that serves `/metrics` need not be the one that counts: a collector takes the newest
snapshot, wherever it came from, at the moment it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstrata.telemetry.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric as Family

    from kvstrata.telemetry.metrics import Metric, Sample


class SnapshotCollector(Collector):
    """Hands a snapshot over whenever Prometheus asks. Register it with a registry.

    Args:
        take_snapshot: the newest numbers.
    """

    def __init__(self, take_snapshot: Callable[[], Iterable[Sample]]) -> None:
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterator[Family]:
        """Every metric of the table that was counted."""
        by_name: dict[str, list[Sample]] = {}
        for sample in self._take_snapshot():
            by_name.setdefault(sample.name, []).append(sample)
        for metric in METRICS:
            if metric.name in by_name:
                yield _family(metric, by_name[metric.name])

    def describe(self) -> Iterator[Family]:
        """The names alone, so that registering takes no snapshot."""
        return (_family(metric, ()) for metric in METRICS)


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        family.add_metric(list(sample.labels), sample.value)
    return family
