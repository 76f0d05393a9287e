"""vLLM's side of the seam: its objects become ours and back, and nothing is decided here.

One instance lives beside the scheduler, one beside each worker; each has one half of the runtime.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstrata.core.hashing import AdoptedHashes
from kvstrata.engines.vllm.adapters import Adapters
from kvstrata.engines.vllm.context import VllmContext, follow_resets
from kvstrata.engines.vllm.events import events_for_vllm
from kvstrata.engines.vllm.hit_sources import HitSources
from kvstrata.engines.vllm.identity import read_identity
from kvstrata.engines.vllm.layout import by_blocks, check_uniform, group_map, read_layout
from kvstrata.engines.vllm.progress import read_progress
from kvstrata.engines.vllm.rank_adapters import AdapterReport, Question, RankAdapters
from kvstrata.engines.vllm.settings import read_settings, warn_of_failure_policy
from kvstrata.engines.vllm.stats import ConnectorPromMetrics, ConnectorStats, StatsFeed
from kvstrata.runtime.assemble import make_scheduler_side, make_worker_side
from kvstrata.runtime.seam import NewRequest, RequestLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's message from the scheduler half."""

    message: bytes
    questions: dict[str, Question] = field(default_factory=dict)
    """About adapters, by request."""


@dataclass
class RankReports(KVConnectorWorkerMetadata):
    """The reports of some ranks, by rank."""

    by_rank: dict[int, bytes]
    adapters: dict[int, AdapterReport | None] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReports:
        """Both."""
        assert isinstance(other, RankReports)
        return RankReports(self.by_rank | other.by_rank, self.adapters | other.adapters)


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):
    """kvstrata as a vLLM connector.

    Args:
        vllm_config: everything; our settings are in `kv_connector_extra_config`.
        role: which half this is.
        kv_cache_config: vLLM's KV groups.

    Raises:
        ConfigError: a setting is wrong; vLLM does not start.
        LayoutError: the model has a KV group that is not known with certainty.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None
        config = read_settings(vllm_config)
        self._cache_config = kv_cache_config
        self._groups = group_map(kv_cache_config)
        self._layout = read_layout(vllm_config, kv_cache_config)
        self._requests: dict[str, Request] = {}
        if role is KVConnectorRole.SCHEDULER:
            warn_of_failure_policy(vllm_config)
            self._stats_feed = StatsFeed()
            self._hit_sources = HitSources(config)
            self._adapters = Adapters(self._layout.parallel.num_ranks)
            self._scheduler_side = make_scheduler_side(
                config, self._layout, max_request_tokens=vllm_config.model_config.max_model_len
            )
        else:
            check_uniform(kv_cache_config)
            self._rank = vllm_config.parallel_config.rank
            identity = read_identity(vllm_config, kv_cache_config)
            self._worker_side = make_worker_side(config, identity, self._rank)
            self._rank_adapters = RankAdapters(vllm_config.lora_config)

    # --- beside the scheduler ---

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over that somebody waits for."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Reach vLLM's blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        context = VllmContext(kv_cache_manager, self._groups, self._requests)
        self._scheduler_side.bind_scheduler_context(context)
        pool = kv_cache_manager.block_pool
        was_reset = functools.partial(self._was_reset, pool)
        follow_resets(pool, self._scheduler_side.let_blocks_go, was_reset)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived; one with an adapter may have to wait for its weights' name."""
        self._requests[request.request_id] = request
        if self._adapters.arrive(request.request_id, request.lora_request):
            self._scheduler_side.add_request(self._new_request(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much can be loaded; always asynchronously."""
        if self._adapters.is_waiting(request.request_id):
            return None, False
        self._add_if_late(request)
        match = self._scheduler_side.match(request.request_id, num_computed_tokens)
        if match is None:
            return None, False
        return match.external_tokens, match.external_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has blocks."""
        self._add_if_late(request)
        tables = self._groups.tables(blocks.get_block_ids())
        self._scheduler_side.allocated(request.request_id, tables, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, *args: object) -> tuple[int, ...]:  # noqa: ARG002
        """The groups whose external blocks are written as a whole."""
        return self._groups.engine_ids

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What ranks shall do in this step."""
        progress = read_progress(scheduler_output, self._groups, self._requests)
        message = self._scheduler_side.plan_step(progress)
        return StepMetadata(message, self._adapters.take_questions())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What ranks have done."""
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, RankReports):
            self._take_adapters(reports)
            ranks = range(self._layout.parallel.num_ranks)
            self._scheduler_side.report([reports.by_rank.get(rank, b"") for rank in ranks])

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request of a model with one group ended; its blocks may be freed."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; blocks that are still copied from are held, the rest may be freed."""
        if self._requests.pop(request.request_id, None) is not None:
            was_waiting = self._adapters.finish(request.request_id)
            if not was_waiting:
                self._scheduler_side.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether to go on stepping without requests."""
        return self._scheduler_side.has_pending_work

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come free without a preemption."""
        return self._scheduler_side.holds_blocks

    def reset_cache(self) -> bool | None:
        """Never offer again what was stored until now: vLLM calls this when weights change."""
        return self._scheduler_side.renew()

    def take_events(self) -> Iterable[Any]:
        """What has happened to chunks."""
        return events_for_vllm(self._scheduler_side.take_events(), self._groups)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Where the tokens of a load come from."""
        sources = self._scheduler_side.hit_sources(request.request_id)
        return self._hit_sources.labelled(sources, num_external_tokens)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call; all of it is counted beside the scheduler."""
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        return self._stats_feed.news(self._scheduler_side.stats())

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Numbers that have crossed a process border."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> ConnectorPromMetrics:  # noqa: ANN401
        """Our part of `/metrics`."""
        return ConnectorPromMetrics(*args, **kwargs)

    # --- beside a worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Look at the caches as bytes, and open arena and tiers."""
        names = {layer.name for group in self._layout.groups for layer in group.layers}
        num_blocks = self._cache_config.num_blocks
        caches = {
            name: by_blocks(cache, num_blocks) for name, cache in kv_caches.items() if name in names
        }
        self._worker_side.register_caches(self._layout, caches, num_blocks)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002, ANN401
        """Start what the scheduler half has asked for."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._worker_side.start_step(metadata.message)
        self._rank_adapters.ask(metadata.questions)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before a request runs."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Stores read whole blocks, after the step."""

    def wait_for_save(self) -> None:
        """Start stores; they run on, and their blocks are held."""
        self._worker_side.start_stores()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose loads ended on this rank."""
        self._report = self._worker_side.report(self._rank_adapters.outdated)
        self._rank_adapters.finish(finished_req_ids)
        ended = self._worker_side.take_ended_loads()
        return KVConnectorTransferResults(
            finished_recving=set(ended.done | ended.failed), failed_recving=set(ended.failed)
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's report."""
        return RankReports(
            {self._rank: self._report}, {self._rank: self._rank_adapters.take_report()}
        )

    # --- both ---

    def shutdown(self) -> None:
        """Stop whichever half this is."""
        if self.role is KVConnectorRole.SCHEDULER:
            self._scheduler_side.close()
        else:
            self._worker_side.close()
            self._rank_adapters.close()

    def _was_reset(self, pool: BlockPool) -> None:
        """The prefix cache of vLLM is empty; its readers were told so, if there are any."""
        self._adapters.reset()
        if pool.enable_kv_cache_events:
            self._scheduler_side.announce_again()

    def _take_adapters(self, reports: RankReports) -> None:
        """Before the stores of a step count: they may have been computed with another adapter."""
        news = self._adapters.report(reports.adapters.values())
        if news.is_doubtful:
            self._scheduler_side.distrust_stores()
        for request_id in news.requests:
            self._scheduler_side.change_request(self._new_request(self._requests[request_id]))

    def _add_if_late(self, request: Request) -> None:
        """Go on with a request that has waited for its adapter's weights."""
        if self._adapters.stop_waiting(request.request_id):
            self._scheduler_side.add_request(self._new_request(request))

    def _new_request(self, request: Request) -> NewRequest:
        tokens = self._layout.hash_block_tokens
        hashes = AdoptedHashes(request.block_hashes, engine_tokens=tokens, hash_block_tokens=tokens)
        params: dict[str, Any] = request.kv_transfer_params or {}
        limits = RequestLimits(params.get("max_offload_tokens"), params.get("max_load_tokens"))
        lora, weights = request.lora_request, self._adapters.weights_of(request.request_id)
        return NewRequest(
            request.request_id,
            hashes,
            request.all_token_ids,
            request.num_prompt_tokens,
            lora=None if lora is None else lora.lora_name,
            limits=limits if weights is not None else RequestLimits(0, 0),
            adapter_weights=weights or b"",
        )
