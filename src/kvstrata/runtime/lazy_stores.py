"""Chunks that are stored only when their blocks are about to be taken for something else.

What a step completes becomes a candidate. In every step the front of the engine's free queue is
looked through; a candidate with a block there is stored, if all its blocks still hold its content.
Storing holds them, so they leave the queue and come back at its end.

Ownership: scheduler thread only. Bounded: a block has no more candidates than chunks fit into it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
    from kvstrata.core.ids import BlockHash, ChunkKey
    from kvstrata.runtime.seam import SchedulerContext, StepProgress
    from kvstrata.runtime.store_jobs import StoreSource

_FEWEST_LOOKED_AT: Final = 32
_STEPS_AHEAD: Final = 2


@dataclass(frozen=True, eq=False, slots=True)
class _Candidate:
    """A chunk in some blocks; the same chunk in other blocks is another candidate."""

    source: StoreSource
    grid: ChunkGrid

    @property
    def key(self) -> ChunkKey:
        return self.source.label.key

    def contents(self) -> Iterator[BlockHash | None]:
        """The prefix that each of its blocks must hold; None: it is not complete yet."""
        group = self.grid.geometry.groups[self.source.ref.group_id].group
        last = ceil_div(self.source.label.tokens.stop, group.block_tokens)
        for block in range(last - len(self.source.blocks), last):
            end = (block + 1) * group.block_tokens
            yield self.grid.hash_before(end) if end <= self.grid.hashed_tokens else None


class LazyStores:
    """Candidates by block.

    Args:
        context: the engine's free queue.
        geometry: the engine's chunks.
    """

    def __init__(self, context: SchedulerContext, geometry: ChunkGeometry) -> None:
        self._context = context
        self._geometry = geometry
        self._candidates: set[_Candidate] = set()
        self._of_block: dict[int, dict[ChunkKey, _Candidate]] = {}

    def __len__(self) -> int:
        return len(self._candidates)

    def remember(self, grid: ChunkGrid, sources: Sequence[StoreSource]) -> None:
        """These are complete and could be stored."""
        for source in sources:
            if not self._can_be_recognised(source):
                continue
            candidate = _Candidate(source, grid)
            chunks = self._geometry.groups[source.ref.group_id]
            most = max(1, chunks.group.block_tokens // chunks.chunk_tokens)
            for block in source.blocks:
                self._make_room(block, candidate.key, most)
            self._candidates.add(candidate)
            for block in source.blocks:
                self._of_block.setdefault(block, {})[candidate.key] = candidate

    def about_to_leave(self, progress: StepProgress) -> list[StoreSource]:
        """Hand over the candidates whose blocks will soon be taken."""
        if not self._candidates:
            return []
        chosen: dict[ChunkKey, StoreSource] = {}
        num_looked_at = self._num_looked_at(len(progress.running))
        for view in itertools.islice(self._context.iter_free_blocks(), num_looked_at):
            for candidate in tuple(self._of_block.get(view.block_id, {}).values()):
                if self._is_whole(candidate):
                    chosen[candidate.key] = candidate.source
                self._forget(candidate)  # nobody can complete the content of a free block
        return sorted(chosen.values(), key=lambda source: source.label.tokens.stop)

    def _num_looked_at(self, num_running: int) -> int:
        """As many blocks as the next steps may take."""
        per_request = sum(ceil_div(512, c.group.block_tokens) for c in self._geometry.groups)
        return max(_FEWEST_LOOKED_AT, _STEPS_AHEAD * per_request * max(1, num_running))

    def _can_be_recognised(self, source: StoreSource) -> bool:
        """Whether a block's prefix tells that it holds this chunk.

        A state within a block gives way to the next one there; a prefix tells of the last alone.
        """
        group = self._geometry.groups[source.ref.group_id].group
        is_state = group.kind is GroupKind.RECURRENT
        return not is_state or source.label.tokens.stop % group.block_tokens == 0

    def _is_whole(self, candidate: _Candidate) -> bool:
        group_id = candidate.source.ref.group_id
        views = map(self._context.get_block, candidate.source.blocks)
        return all(
            content is not None and view.block_hash == content and view.group_id == group_id
            for view, content in zip(views, candidate.contents(), strict=True)
        )

    def _make_room(self, block: int, key: ChunkKey, most: int) -> None:
        """Forget the same chunk in this block, and what the block held before."""
        if key in self._of_block.get(block, {}):
            self._forget(self._of_block[block][key])
        while len(others := self._of_block.get(block, {})) >= most:
            self._forget(next(iter(others.values())))

    def _forget(self, candidate: _Candidate) -> None:
        self._candidates.discard(candidate)
        for block in candidate.source.blocks:
            others = self._of_block.get(block, {})
            if others.get(candidate.key) is candidate:
                del others[candidate.key]
            if not others:
                self._of_block.pop(block, None)
