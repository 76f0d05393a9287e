"""The memory of the cache, and each layer's tensors over it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvstrata.engine.cache.specs import StateSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata.core.layout import KVGroup
    from kvstrata.engine.cache.grouping import CachePlan
    from kvstrata.engine.cache.specs import CacheSpec, PagedSpec

LayerTensors = dict[str, list[torch.Tensor]]


def allocate_tensors(
    plan: CachePlan,
    specs: Mapping[str, CacheSpec],
    num_blocks: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> LayerTensors:
    """Allocate the storages and lay every layer's tensors over them.

    Attention gets one tensor (kernel blocks, ...), a state one tensor (blocks, ...) per part.
    """
    size = num_blocks * plan.page_bytes
    storages = [
        torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(plan.num_storages)
    ]
    tensors: LayerTensors = {}
    for group in plan.layout.groups:
        for layer, storage in zip(group.layers, storages, strict=False):
            spec = specs[layer.name]
            if isinstance(spec, StateSpec):
                tensors[layer.name] = _state_parts(spec, storage, num_blocks)
            else:
                tensors[layer.name] = [_rows(spec, group, storage, num_blocks, dtype)]
    return tensors


def _rows(
    spec: PagedSpec, group: KVGroup, storage: torch.Tensor, num_blocks: int, dtype: torch.dtype
) -> torch.Tensor:
    num_rows = num_blocks * group.rows_per_block
    shape = spec.row_shape(group.cut_tokens)
    return _strided(storage, dtype, num_rows, shape, 0)


def _state_parts(spec: StateSpec, storage: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for part in spec.parts:
        tensors.append(_strided(storage, part.dtype, num_blocks, part.shape, offset))
        offset += part.num_bytes
    return tensors


def _strided(
    storage: torch.Tensor, dtype: torch.dtype, num_rows: int, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Rows of this shape, at equal distances over the whole storage."""
    typed = storage.view(dtype)
    row_stride = typed.numel() // num_rows
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return typed.as_strided((num_rows, *shape), (row_stride, *inner), offset // dtype.itemsize)
