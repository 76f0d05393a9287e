"""Our numbers on vLLM's way to `/metrics`: counted beside the scheduler, shown by an API server.

A payload holds what was counted since the last one, and gauges as they are; adding payloads up in
any order and in any process gives what was counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstrata.telemetry.metrics import METRICS, Sample, increments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.config import VllmConfig

_SAMPLES: Final = "samples"
_GAUGES: Final = frozenset(metric.name for metric in METRICS if metric.kind == "gauge")
_PREFIX: Final = "vllm:"


@dataclass
class ConnectorStats(KVConnectorStats):
    """What was counted since the last one of these."""

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> ConnectorStats:
        """Ready to be sent."""
        return cls({_SAMPLES: [[s.name, list(s.labels), s.value] for s in samples]})

    def samples(self) -> Iterator[Sample]:
        """The numbers inside."""
        for name, labels, value in self.data.get(_SAMPLES, ()):
            yield Sample(name, tuple(labels), value)

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Both: counts added up, the other's gauges."""
        assert isinstance(other, ConnectorStats)
        total = {(sample.name, sample.labels): sample.value for sample in self.samples()}
        for name, labels, value in map(_fields, other.samples()):
            before = 0.0 if name in _GAUGES else total.get((name, labels), 0.0)
            total[name, labels] = before + value
        return self.of(Sample(name, labels, value) for (name, labels), value in total.items())

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what is not zero, by a readable name."""
        return {_shown(sample): round(sample.value, 3) for sample in self.samples() if sample.value}

    def is_empty(self) -> bool:
        """Whether nothing is inside."""
        return not self.data.get(_SAMPLES)

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}


class StatsFeed:
    """Turns snapshots into what is new in them. Belongs to the scheduler thread."""

    def __init__(self) -> None:
        self._last: list[Sample] = []

    def news(self, snapshot: list[Sample]) -> ConnectorStats | None:
        """What has changed since the last snapshot; None: nothing."""
        before = {(sample.name, sample.labels): sample.value for sample in self._last}
        news = [
            new
            for new, now in zip(increments(self._last, snapshot), snapshot, strict=True)
            if before.get((now.name, now.labels)) != now.value
        ]
        self._last = snapshot
        return ConnectorStats.of(news) if news else None


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Every metric of the table, under vLLM's prefix and with its labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = {"counter": metric_types[Counter], "gauge": metric_types[Gauge]}
        several = {"counter": {}, "gauge": {"multiprocess_mode": "mostrecent"}}
        self._metrics = {
            metric.name: make[metric.kind](
                name=f"{_PREFIX}{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **several[metric.kind],
            )
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an engine has sent; names of another version of the table are left out."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in map(_fields, ConnectorStats(transfer_stats_data).samples()):
            if (metric := self._metrics.get(name)) is None:
                continue
            labelled = metric.labels(*engine, *labels)
            labelled.set(value) if name in _GAUGES else labelled.inc(value)


def _fields(sample: Sample) -> tuple[str, tuple[str, ...], float]:
    return sample.name, sample.labels, sample.value


def _shown(sample: Sample) -> str:
    labels = f"[{','.join(sample.labels)}]" if sample.labels else ""
    return f"{sample.name.removeprefix('kvstrata_').removesuffix('_total')}{labels}"
