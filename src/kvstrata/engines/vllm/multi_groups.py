"""What several connectors must know about vLLM's KV groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The groups of a model, in short."""

    kinds: tuple[str, ...]
    """The name of each group's spec."""
    is_plain: bool
    """One group of full attention: what every connector keeps."""
    has_recurrent: bool
    stride_tokens: int
    """Hits that are found by hashes are multiples of this."""
    cacheable_ids: tuple[int, ...]
    """Groups whose blocks can be found by their hashes."""

    @property
    def takes_sync_loads(self) -> bool:
        """Whether a load within a step is right, and its failure can be told to vLLM."""
        return len(self.kinds) == 1 and not self.has_recurrent


def read_groups(config: KVCacheConfig) -> GroupFacts:
    """The facts about a model's groups."""
    specs = [_inner(group.kv_cache_spec) for group in config.kv_cache_groups]
    every = tuple(range(len(specs)))
    return GroupFacts(
        kinds=tuple(type(spec).__name__ for spec in specs),
        is_plain=len(specs) == 1 and isinstance(specs[0], FullAttentionSpec),
        has_recurrent=any(isinstance(spec, MambaSpec) for spec in specs),
        stride_tokens=getattr(config, "cache_hit_alignment_tokens", None)
        or math.lcm(*(int(spec.block_size) for spec in specs)),
        cacheable_ids=tuple(getattr(config, "prefix_cacheable_group_ids", every)),
    )


def _inner(spec: Any) -> Any:  # noqa: ANN401 - vLLM's specs share no typed base
    """One layer's spec, for the facts that all layers of a group share."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec
