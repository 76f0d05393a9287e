"""An engine's device memory as a witness sees it: read whole blocks, overwrite everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, whole_units
from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.transfers.cache_views import CacheViews

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata.core.layout import KVGroup, KVLayout
    from kvstrata.runtime.seam import WorkerConnector
    from kvstrata.transfers.cache_views import LayerCache

_RUBBISH: Final = 0x5A
"""Fills thrown-away memory: large and finite as a float, so that a block not restored shows."""


class BlockBytes(NamedTuple):
    """What one group's blocks hold for a request."""

    positions: tuple[int, ...]
    """Places in the request's block table."""
    content: torch.Tensor

    def is_same_as(self, other: BlockBytes) -> bool:
        """Whether both have the same bytes at the same places."""
        return self.positions == other.positions and self.content.equal(other.content)


class DeviceMemory:
    """The caches of one rank in this process, known once they are registered."""

    def register(self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int) -> None:
        """Look at the caches from now on."""
        self._layout = layout
        self._views = CacheViews(layout, caches, num_blocks)
        self._tensors = [
            tensor
            for cache in caches.values()
            for tensor in (cache if isinstance(cache, list) else [cache])
        ]

    def read(self, tables: Sequence[Sequence[int]], num_tokens: int) -> tuple[BlockBytes, ...]:
        """A request's blocks by group, those whose every byte is defined: full ones and states."""
        return tuple(
            self._read_group(GroupId(group_id), tables[group_id], num_tokens)
            for group_id in range(len(self._layout.groups))
        )

    def overwrite(self) -> None:
        """Fill all of it with rubbish."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._tensors}
        for storage in storages.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_RUBBISH)

    def _read_group(self, group_id: GroupId, table: Sequence[int], num_tokens: int) -> BlockBytes:
        group = self._layout.groups[group_id]
        positions = [p for p in _defined(group, num_tokens) if table[p] != NULL_BLOCK]
        rows = [row for p in positions for row in _rows(group, table[p])]
        return BlockBytes(tuple(positions), self._views.gather(group_id, rows))


class WatchedWorker:
    """A connector's worker half, beside a `DeviceMemory` that gets to know the caches.

    Args:
        worker: does the work.
        memory: is shown the caches.
    """

    def __init__(self, worker: WorkerConnector, memory: DeviceMemory) -> None:
        self._worker = worker
        self._memory = memory
        self.start_step = worker.start_step
        self.finish_step = worker.finish_step
        self.close = worker.close

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        """Show the caches to both."""
        self._memory.register(layout, caches, num_blocks)
        self._worker.register_caches(layout, caches, num_blocks)


def _defined(group: KVGroup, num_tokens: int) -> range:
    """The positions whose blocks are complete; a state is, wherever it was taken."""
    if group.kind is GroupKind.RECURRENT:
        return range(ceil_div(num_tokens, group.block_tokens))
    return range(whole_units(num_tokens, group.block_tokens))


def _rows(group: KVGroup, block_id: int) -> range:
    """A block's rows in the cache."""
    first = block_id * group.rows_per_block
    return range(first, first + group.rows_per_block)
