"""The hooks while vLLM starts, for several connectors as one; what a child raises ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvstrata.engines.vllm.multi_children import naming
from kvstrata.engines.vllm.multi_messages import MultiHandshake
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvstrata.engines.several.guard import GuardedChild
    from kvstrata.engines.several.rank_guard import RankChild


class SchedulerStart(KVConnectorBase_V1):
    """Beside the scheduler."""

    _children: Sequence[GuardedChild[Any]]
    _pool: BlockPool | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether any child hands over what somebody waits for."""
        return any(child.connector.requires_kv_delivery for child in self._children)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether every child can complete them."""
        name = "supports_divergent_local_hybrid_hits"
        return all(getattr(child.connector, name, False) for child in self._children)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Show every child vLLM's blocks."""
        self._kv_cache_manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        for child in self._children:
            with naming(child.name):
                child.connector.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The same, where vLLM shows its pool alone."""
        self._pool = gpu_block_pool
        for child in self._children:
            with naming(child.name):
                child.connector.bind_gpu_block_pool(gpu_block_pool)

    def get_finished_count(self) -> int | None:
        """Every rank reports each request.

        Raises:
            ConfigError: a child wants it otherwise.
        """
        num_ranks = self._vllm_config.parallel_config.world_size
        for child in self._children:
            count = child.connector.get_finished_count()
            if count is not None and count != num_ranks:
                raise ConfigError(
                    "connectors",
                    f"{child.name} reports requests on {count} of {num_ranks} ranks",
                    "connectors that report on every rank",
                )
        return None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, MultiHandshake]) -> None:
        """Hand every child what its own ranks said."""
        for child in self._children:
            if own := MultiHandshake.of_child(child.name, metadata):
                with naming(child.name):
                    child.connector.set_xfer_handshake_metadata(own)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], MultiHandshake]
    ) -> None:
        """The same, with ranks by stage."""
        for child in self._children:
            if own := MultiHandshake.of_child(child.name, metadata):
                with naming(child.name):
                    child.connector.set_xfer_handshake_metadata_pp_aware(own)


class WorkerStart(KVConnectorBase_V1):
    """Beside a rank."""

    _ranked: Mapping[str, RankChild[Any]]

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The pool that a child wants the caches to be in.

        Raises:
            ConfigError: two children want one.
        """
        asked = {
            name: child.connector.get_mem_pool_context() for name, child in self._ranked.items()
        }
        wanted = {name: context for name, context in asked.items() if context is not None}
        if len(wanted) > 1:
            raise ConfigError(
                "connectors", f"{', '.join(wanted)} want a memory pool of their own", "one at most"
            )
        return next(iter(wanted.values()), None)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Show every child the caches; what it raises ends vLLM's start."""
        for name, child in self._ranked.items():
            with naming(name):
                child.connector.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:  # noqa: ANN401 - vLLM's
        """Hand every child vLLM's copy operation."""
        for name, child in self._ranked.items():
            with naming(name):
                child.connector.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> MultiHandshake | None:
        """What children want to be known by others."""
        parts = {
            name: said
            for name, child in self._ranked.items()
            if (said := child.connector.get_handshake_metadata()) is not None
        }
        return MultiHandshake(parts) if parts else None
