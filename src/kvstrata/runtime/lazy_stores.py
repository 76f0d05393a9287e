"""Chunks that are stored only when their blocks are about to be taken for something else.

What a step completes becomes a candidate. In every step the front of the engine's free queue is
looked through; a candidate with a block there is stored, if all its blocks still hold its content.
Storing holds them, so they leave the queue and come back at its end.

Ownership: scheduler thread only. Bounded: a block belongs to one candidate at most.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.spans import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
    from kvstrata.core.ids import BlockHash, ChunkKey
    from kvstrata.runtime.seam import SchedulerContext, StepProgress
    from kvstrata.runtime.store_jobs import StoreSource

_FEWEST_LOOKED_AT: Final = 32
_STEPS_AHEAD: Final = 2


class _Candidate(NamedTuple):
    source: StoreSource
    contents: tuple[BlockHash, ...]
    """The prefix that each of its blocks must hold."""


class LazyStores:
    """Candidates by key and by block.

    Args:
        context: the engine's free queue.
        geometry: the engine's chunks.
    """

    def __init__(self, context: SchedulerContext, geometry: ChunkGeometry) -> None:
        self._context = context
        self._geometry = geometry
        self._candidates: dict[ChunkKey, _Candidate] = {}
        self._key_of_block: dict[int, ChunkKey] = {}
        self._most_tokens = 0

    def __len__(self) -> int:
        return len(self._candidates)

    def remember(self, grid: ChunkGrid, sources: Sequence[StoreSource]) -> None:
        """These are complete and could be stored."""
        for source in sources:
            self._forget(source.label.key)
            for block in source.blocks:
                self._forget(self._key_of_block.get(block))
            self._candidates[source.label.key] = _Candidate(source, _contents(grid, source))
            self._key_of_block |= dict.fromkeys(source.blocks, source.label.key)

    def about_to_leave(self, progress: StepProgress) -> list[StoreSource]:
        """Hand over the candidates whose blocks will soon be taken."""
        if not self._candidates:
            return []
        chosen: dict[ChunkKey, StoreSource] = {}
        num_looked_at = self._num_looked_at(len(progress.running))
        for view in itertools.islice(self._context.iter_free_blocks(), num_looked_at):
            key = self._key_of_block.get(view.block_id)
            if key is None or key in chosen:
                continue
            candidate = self._candidates[key]
            if self._is_whole(candidate):
                chosen[key] = candidate.source
        for key in chosen:
            self._forget(key)
        return sorted(chosen.values(), key=lambda source: source.label.tokens.stop)

    def _num_looked_at(self, num_running: int) -> int:
        """As many blocks as the next steps may take."""
        per_request = sum(ceil_div(512, c.group.block_tokens) for c in self._geometry.groups)
        return max(_FEWEST_LOOKED_AT, _STEPS_AHEAD * per_request * max(1, num_running))

    def _is_whole(self, candidate: _Candidate) -> bool:
        group_id = candidate.source.ref.group_id
        views = map(self._context.get_block, candidate.source.blocks)
        return all(
            view.block_hash == content and view.group_id == group_id
            for view, content in zip(views, candidate.contents, strict=True)
        )

    def _forget(self, key: ChunkKey | None) -> None:
        candidate = self._candidates.pop(key, None) if key is not None else None
        if candidate is not None:
            for block in candidate.source.blocks:
                self._key_of_block.pop(block, None)


def _contents(grid: ChunkGrid, source: StoreSource) -> tuple[BlockHash, ...]:
    """The prefix hash at the end of each block of a chunk."""
    group = grid.geometry.groups[source.ref.group_id].group
    last = ceil_div(source.label.tokens.stop, group.block_tokens)
    first = last - len(source.blocks)
    return tuple(grid.hash_before((block + 1) * group.block_tokens) for block in range(first, last))
