"""Several vLLM connectors as one: ours, vLLM's own, and anybody's, by module path.

    {"kv_connector": "KVStrataMultiConnector",
     "kv_connector_module_path": "kvstrata.engines.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"connectors": [
         {"name": "near", "load_weight": 2.0, "match_deadline": "1s",
          "kv_connector": "KVStrataConnector", "kv_connector_module_path": "kvstrata.engines.vllm",
          "kv_connector_extra_config": {"host": {"capacity": "64GiB"}}},
         {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}}]}}

`multi_matching` and `multi_scheduler` have the hooks beside the scheduler, `multi_worker` those
beside a rank; here are making, questions to classes, numbers and the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA

from kvstrata.engines.several.guard import GuardedChild
from kvstrata.engines.several.payload import counts_since, entry_of
from kvstrata.engines.vllm.multi_children import (
    check_groups,
    make_children,
    read_class_specs,
    read_specs,
)
from kvstrata.engines.vllm.multi_groups import read_groups
from kvstrata.engines.vllm.multi_prom import MultiPromMetrics
from kvstrata.engines.vllm.multi_scheduler import SchedulerHooks
from kvstrata.engines.vllm.multi_stats import MultiStats, plain_stats
from kvstrata.engines.vllm.multi_worker import WorkerHooks
from kvstrata.errors import ConfigError
from kvstrata.runtime.multi_child import ChildStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVStrataMultiConnector(SchedulerHooks, WorkerHooks, SupportsHMA):
    """Several connectors: the best one loads, all of them store.

    Args:
        vllm_config: everything; the children are in `kv_connector_extra_config`.
        role: which half this is.
        kv_cache_config: vLLM's KV groups.

    Raises:
        ConfigError: a setting is wrong, or a child cannot keep the model's groups.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None
        self._specs = read_specs(vllm_config.kv_transfer_config)
        groups = read_groups(kv_cache_config)
        check_groups(self._specs, groups)
        made = make_children(self._specs, vllm_config, role, kv_cache_config)
        pairs = list(zip(self._specs, made, strict=True))
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler([GuardedChild(spec.settings, c) for spec, c in pairs], groups)
        else:
            self._open_worker({spec.name: connector for spec, connector in pairs}, groups)
        self._sent: dict[str, ChildStats] = {}

    # --- classes alone ---

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that children ask for.

        Raises:
            ConfigError: they ask for different ones.
        """
        wishes = {
            spec.name: spec.connector_class.get_required_kvcache_layout(spec.config(vllm_config))
            for spec in read_specs(vllm_config.kv_transfer_config)
        }
        wishes = {name: layout for name, layout in wishes.items() if layout is not None}
        if len(set(wishes.values())) > 1:
            raise ConfigError("connectors", f"they need KV layouts {wishes}", "one layout for all")
        return next(iter(wishes.values()), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether any child works layer by layer."""
        return any(
            spec.connector_class.requires_piecewise_for_cudagraph(
                spec.transfer.kv_connector_extra_config
            )
            for spec in read_class_specs(extra_config, {"kv_role": "kv_both"})
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Numbers that came from another process."""
        return MultiStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Metrics of the children, and about them."""
        specs = read_specs(vllm_config.kv_transfer_config)
        return MultiPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, specs
        )

    # --- both halves ---

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has happened since the last call, by child."""
        entries = {
            spec.name: entry_of(
                spec.class_path, self._new_counts(spec.name), self._own_stats(spec.name)
            )
            for spec in self._specs
        }
        data = {name: entry for name, entry in entries.items() if entry}
        return MultiStats(data=data) if data else None

    def child_stats(self) -> dict[str, ChildStats]:
        """What every child has done so far, by name; beside the scheduler. Changes nothing."""
        return {c.name: c.stats(self._loads.num_pending(c.name)) for c in self._children}

    def shutdown(self) -> None:
        """Shut every child down, whichever half this is."""
        if self.role is KVConnectorRole.SCHEDULER:
            for child in self._children:
                child.settle("shutdown", lambda c: c.shutdown(), None)
        else:
            for ranked in self._ranked.values():
                ranked.close()

    def _new_counts(self, name: str) -> dict[str, int]:
        if self.role is not KVConnectorRole.SCHEDULER:
            return {}
        now = self.child_stats()[name]
        before = self._sent.get(name, ChildStats())
        self._sent[name] = now
        return counts_since(before, now)

    def _own_stats(self, name: str) -> dict[str, Any] | None:
        """A child's own numbers, as plain data."""
        hook = "get_kv_connector_stats"
        if self.role is KVConnectorRole.SCHEDULER:
            child = next(child for child in self._children if child.name == name)
            return child.use(hook, lambda c: plain_stats(c.get_kv_connector_stats()), None)
        return self._ranked[name].call(
            hook, lambda c: plain_stats(c.get_kv_connector_stats()), None
        )
