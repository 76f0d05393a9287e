"""Prometheus metrics of several connectors: what is counted about them, and their own.

The children's own metrics carry one label more, so that two children of one class stay apart.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvstrata.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.config import VllmConfig

    from kvstrata.engines.vllm.multi_children import ChildSpec
    from kvstrata.telemetry.metrics import Metric

_log = logging.getLogger(__name__)

_LABEL: Final = "connector"
"""What the children's own metrics are told apart by."""
_PREFIX: Final = "vllm:"
_COUNTERS: Final = {
    "queries": metrics.CHILD_QUERIES,
    "hits": metrics.CHILD_HITS,
    "hit_tokens": metrics.CHILD_HIT_TOKENS,
    "misses": metrics.CHILD_MISSES,
}
_PENDING: Final = "pending_loads"


class MultiPromMetrics(KVConnectorPromMetrics):
    """What an API server shows of several connectors.

    Args:
        vllm_config: everything.
        metric_types: Prometheus's classes, or what vLLM uses for them.
        labelnames: labels that every metric has.
        per_engine_labelvalues: their values, by engine.
        specs: the children.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        specs: Sequence[ChildSpec],
    ) -> None:
        shared = {kind: _made_once(make) for kind, make in metric_types.items()}
        super().__init__(vllm_config, shared, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._counter_cls(**_described(metric, labelnames))
            for key, metric in _COUNTERS.items()
        }
        pending = _described(metrics.CHILD_PENDING, labelnames)
        self._pending = self._gauge_cls(**pending, multiprocess_mode="mostrecent")
        self._by_child: dict[str, KVConnectorPromMetrics] = {}
        for spec in specs:
            values = {i: [*some, spec.name] for i, some in per_engine_labelvalues.items()}
            own = _child_metrics(spec, vllm_config, shared, [*labelnames, _LABEL], values)
            if own is not None:
                self._by_child[spec.name] = own

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in a payload."""
        for name, entry in transfer_stats_data.items():
            labels = [*self.per_engine_labelvalues[engine_idx], name]
            counts = entry.get("counts", {})
            for key in counts.keys() & _COUNTERS.keys():
                self._counters[key].labels(*labels).inc(counts[key])
            if _PENDING in counts:
                self._pending.labels(*labels).set(counts[_PENDING])
            if "stats" in entry and name in self._by_child:
                self._observe_child(name, entry["stats"], engine_idx)

    def _observe_child(self, name: str, stats: dict[str, Any], engine_idx: int) -> None:
        try:
            self._by_child[name].observe(stats, engine_idx)
        except Exception:  # noqa: BLE001 - numbers are not worth a server
            _log.exception("connector %s: its metrics are not taken in any more", name)
            del self._by_child[name]


def _child_metrics(
    spec: ChildSpec,
    vllm_config: VllmConfig,
    metric_types: Mapping[type[Any], Any],
    labels: list[str],
    values: Mapping[int, list[object]],
) -> KVConnectorPromMetrics | None:
    try:
        own = spec.config(vllm_config)
        return spec.connector_class.build_prom_metrics(own, metric_types, labels, values)
    except Exception:  # noqa: BLE001 - numbers are not worth a server
        _log.exception("connector %s: it has no metrics", spec.name)
        return None


def _described(metric: Metric, labelnames: list[str]) -> dict[str, Any]:
    """A row of the table as Prometheus wants it."""
    return {
        "name": f"{_PREFIX}{metric.name}",
        "documentation": metric.help,
        "labelnames": [*labelnames, *metric.labels],
    }


def _made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Two children of one class share their metrics, and differ in a label's value."""
    made: dict[str, Any] = {}

    def once(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a metric's arguments
        if name not in made:
            made[name] = make(name, *args, **kwargs)
        return made[name]

    return once
