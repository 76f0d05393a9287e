"""Copies with plain tensor operations, for caches in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import ChunkCopy


class PlainCopier:
    """Moves chunks one by one.

    Args:
        views: the engine's caches.
        arena: the rank's memory for chunks.
    """

    def __init__(self, views: CacheViews, arena: HostArena) -> None:
        self._views = views
        self._arena = arena

    def load(self, copy: ChunkCopy) -> None:
        """From the arena into the caches."""
        parts = self._parts(copy)
        payload = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._views.scatter(copy.group_id, copy.rows, payload, first_row=copy.first_row)

    def store(self, copy: ChunkCopy) -> None:
        """From the caches into the arena."""
        parts = self._parts(copy)
        if len(parts) == 1:
            self._views.gather_into(parts[0], copy.group_id, copy.rows)
            return
        payload = self._views.gather(copy.group_id, copy.rows)
        for part, source in zip(parts, payload.split([p.numel() for p in parts]), strict=True):
            part.copy_(source)

    def _parts(self, copy: ChunkCopy) -> list[torch.Tensor]:
        """The chunk's memory, cut to its payload."""
        parts, left = [], copy.payload_bytes
        for view in self._arena.parts(copy.extents):
            parts.append(torch.frombuffer(view, dtype=torch.uint8)[:left])
            left -= parts[-1].numel()
        return parts
