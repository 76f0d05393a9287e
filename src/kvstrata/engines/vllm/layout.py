"""vLLM's description of its KV cache, as ours.

Groups that cannot be found by their hashes, or are not to be transferred, are left out; so our
group ids and vLLM's may differ, and `GroupMap` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstrata.core.ids import GroupId
from kvstrata.core.layout import (
    GroupKind,
    KVGroup,
    KVLayer,
    KVLayout,
    ParallelLayout,
    Sharding,
)
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    from kvstrata.runtime.seam import BlockTables


@dataclass(frozen=True, slots=True)
class GroupMap:
    """Which of vLLM's groups are ours, in our order."""

    engine_ids: tuple[int, ...]

    def tables(self, block_ids: Sequence[Sequence[int]]) -> BlockTables:
        """Our groups' block tables out of all."""
        return tuple(block_ids[engine_id] for engine_id in self.engine_ids)

    @property
    def is_identity(self) -> bool:
        """Whether our ids are vLLM's."""
        return self.engine_ids == tuple(range(len(self.engine_ids)))

    def theirs(self, group_id: GroupId) -> int:
        """vLLM's id of one of our groups."""  # noqa: D403 - its name
        return self.engine_ids[group_id]

    def ours(self, engine_id: int) -> GroupId | None:
        """Our id of one of vLLM's groups; None: it is left out."""
        if engine_id not in self.engine_ids:
            return None
        return GroupId(self.engine_ids.index(engine_id))


def group_map(config: KVCacheConfig) -> GroupMap:
    """The groups whose blocks can be found by their hashes."""
    ids = getattr(config, "prefix_cacheable_group_ids", None)
    return GroupMap(tuple(range(len(config.kv_cache_groups)) if ids is None else ids))


def read_layout(vllm_config: VllmConfig, config: KVCacheConfig) -> KVLayout:
    """The layout of the groups that take part.

    Raises:
        LayoutError: a group is of a kind that is not known with certainty.
    """
    groups = [config.kv_cache_groups[index] for index in group_map(config).engine_ids]
    if not groups:
        raise LayoutError("vLLM has no KV group that prefix caching can find; enable it")
    parallel = vllm_config.parallel_config
    return KVLayout(
        groups=tuple(map(_group, groups)),
        hash_block_tokens=_hash_block_tokens(vllm_config, config),
        dtype=str(vllm_config.cache_config.cache_dtype),
        parallel=ParallelLayout(
            tensor=parallel.tensor_parallel_size, pipeline=parallel.pipeline_parallel_size
        ),
        hit_alignment_tokens=getattr(config, "cache_hit_alignment_tokens", None),
    )


def check_uniform(config: KVCacheConfig) -> None:
    """Refuse groups that vLLM describes to its scheduler by one layer that is unlike others.

    Raises:
        LayoutError: pages of one group differ in size.
    """
    for index in group_map(config).engine_ids:
        group = config.kv_cache_groups[index]
        sizes = {_real_bytes(_of_layer(group.kv_cache_spec, name)) for name in group.layer_names}
        if len(sizes) > 1:
            raise LayoutError(
                f"vLLM's KV group {index} has layers with pages of {sorted(sizes)} bytes; known "
                f"are groups whose layers are alike"
            )


def by_blocks(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache with one row per block, also where kernels see smaller blocks."""
    if cache.shape[0] == num_blocks:
        return cache
    return cache.unflatten(0, (num_blocks, -1))


def _hash_block_tokens(vllm_config: VllmConfig, config: KVCacheConfig) -> int:
    found = getattr(config, "hash_block_size", None)
    if found is not None:
        return int(found)
    from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415 - older versions only
        resolve_kv_cache_block_sizes,
    )

    return int(resolve_kv_cache_block_sizes(config, vllm_config)[1])


def _group(group: KVCacheGroupSpec) -> KVGroup:
    spec = _inner(group.kv_cache_spec)
    kind = _kind(spec)
    is_replicated = isinstance(spec, MLAAttentionSpec) or getattr(spec, "tp_replicated", False)
    return KVGroup(
        kind=kind,
        block_tokens=spec.block_size,
        layers=tuple(
            KVLayer(name, _real_bytes(_of_layer(group.kv_cache_spec, name)))
            for name in group.layer_names
        ),
        window_tokens=_window_tokens(spec),
        sharding=Sharding.REPLICATED if is_replicated else Sharding.SHARDED,
        is_draft=bool(getattr(group, "is_eagle_group", False)),
    )


def _inner(spec: KVCacheSpec) -> Any:  # noqa: ANN401 - vLLM's specs share no typed base
    """One layer's spec, for the facts that all layers of a group share."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _of_layer(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer]
    return spec


def _kind(spec: KVCacheSpec) -> GroupKind:
    if isinstance(spec, MambaSpec):
        return GroupKind.RECURRENT
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return GroupKind.WINDOW
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL
    raise LayoutError(
        f"vLLM has a KV group of kind {type(spec).__name__}, which kvstrata does not know; "
        f"known: full, MLA, sliding-window and chunked attention, mamba and other states"
    )


def _window_tokens(spec: Any) -> int | None:  # noqa: ANN401 - as above
    """What a token may look back on; attention within fixed chunks never looks further than one."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def _real_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one block of a layer, padding not counted."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
