"""From what layers need to groups that share one pool of equal blocks.

Layers with the same needs form groups of equally many layers. Layer i of *every* group lies over
storage i, so a block id stands for one page in each storage and can serve any group:

              storage 0    storage 1    storage 2
    group 0   layer 0      layer 1      layer 2       full attention
    group 1   layer 3      layer 4      layer 5       gated delta net
    group 2   layer 6      layer 7      -             gated delta net

Pages must be equally large for that. The largest need decides; groups with smaller kernel blocks
put several of them into one block, so groups come to have different numbers of tokens per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout, ParallelLayout
from kvstrata.core.spans import ceil_to
from kvstrata.engine.cache.specs import StateSpec
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvstrata.engine.cache.specs import CacheSpec, PagedSpec

_ALIGNMENT: Final = 64
"""Rows start at multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a model's caches share memory, on one rank."""

    layout: KVLayout
    page_bytes: int
    """Bytes of one block in one storage, padding included."""
    num_storages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """What a user may choose about the cache."""

    kernel_block_tokens: int = 16
    """Tokens per kernel block, the smallest unit that attention is paged in."""
    state_tokens: int | None = None
    """A recurrent state may be kept at multiples of this; None: at ends of the largest block."""


def plan_cache(
    specs: Mapping[str, CacheSpec],
    dtype: torch.dtype,
    settings: CacheSettings | None = None,
    parallel: ParallelLayout | None = None,
) -> CachePlan:
    """Share out memory among layers.

    Args:
        specs: what each layer needs, by name.
        dtype: of attention caches.
        settings: the user's choices.
        parallel: the ranks, for the layout's fingerprint.

    Raises:
        LayoutError: there are no layers, or the settings do not fit together.
    """
    settings = settings or CacheSettings()
    if not specs:
        raise LayoutError("the model has no layer with a cache")
    alike = _alike(specs)
    num_storages = min(len(names) for names in alike.values())
    smallest = max(_smallest_page(spec, dtype, settings) for spec in alike)
    rows = {spec: _rows(spec, dtype, settings, smallest) for spec in alike}
    page_bytes = ceil_to(smallest, _ALIGNMENT * math.lcm(*rows.values()))
    block_tokens = {spec: settings.kernel_block_tokens * count for spec, count in rows.items()}
    state_tokens = settings.state_tokens or max(block_tokens.values())
    groups = tuple(
        _group(spec, names[start : start + num_storages], dtype, settings, rows[spec], state_tokens)
        for spec, names in alike.items()
        for start in range(0, len(names), num_storages)
    )
    layout = KVLayout(
        groups=groups,
        hash_block_tokens=KVLayout.largest_hash_block(groups),
        dtype=str(dtype).removeprefix("torch."),
        parallel=parallel or ParallelLayout(),
    )
    return CachePlan(layout, page_bytes, num_storages)


def _alike(specs: Mapping[str, CacheSpec]) -> dict[CacheSpec, list[str]]:
    """The layers with equal needs, attention first."""
    alike: dict[CacheSpec, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(spec, []).append(name)
    return dict(sorted(alike.items(), key=lambda item: item[0].kind is GroupKind.RECURRENT))


def _row_bytes(spec: PagedSpec, dtype: torch.dtype, settings: CacheSettings) -> int:
    return math.prod(spec.row_shape(settings.kernel_block_tokens)) * dtype.itemsize


def _smallest_page(spec: CacheSpec, dtype: torch.dtype, settings: CacheSettings) -> int:
    if isinstance(spec, StateSpec):
        return spec.num_bytes
    return _row_bytes(spec, dtype, settings)


def _rows(spec: CacheSpec, dtype: torch.dtype, settings: CacheSettings, page_bytes: int) -> int:
    """Kernel blocks that fit into one page."""
    if isinstance(spec, StateSpec):
        return 1
    return max(1, page_bytes // _row_bytes(spec, dtype, settings))


def _group(
    spec: CacheSpec,
    names: Sequence[str],
    dtype: torch.dtype,
    settings: CacheSettings,
    rows: int,
    state_tokens: int,
) -> KVGroup:
    if isinstance(spec, StateSpec):
        layers = tuple(KVLayer(name, spec.num_bytes) for name in names)
        return KVGroup(kind=spec.kind, block_tokens=state_tokens, layers=layers)
    page = rows * _row_bytes(spec, dtype, settings)
    kernel = settings.kernel_block_tokens
    return KVGroup(
        kind=spec.kind,
        block_tokens=rows * kernel,
        layers=tuple(KVLayer(name, page) for name in names),
        kernel_block_tokens=kernel if rows > 1 else None,
        window_tokens=getattr(spec, "window_tokens", None),
        sharding=spec.sharding,
    )


def blocks_for_bytes(plan: CachePlan, capacity_bytes: int) -> int:
    """Blocks that fit into this much memory on one rank."""
    return capacity_bytes // (plan.page_bytes * plan.num_storages)
