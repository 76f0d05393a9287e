"""One chunk is lost for good: a shorter hit, the reason for it, and the same answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.chunk_grid import ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.layout import GroupKind
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.showcase.events import GroupPicture, Mark, PartialHit
from kvstrata.showcase.serving import ObservedEngine
from kvstrata.tiers.chunk_format import key_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from kvstrata.core.chunk_grid import GroupChunks
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.layout import KVLayout
    from kvstrata.planning.load_plan import LoadPlan

_TELLING: Final = (GroupKind.RECURRENT, GroupKind.WINDOW, GroupKind.FULL)
"""Groups whose loss says most come first."""


def show_partial_hit(model: str, folder: Path, prompt: Sequence[int], store: Path) -> PartialHit:
    """Store a prompt's chunks in a directory, remove one, and restore with a new engine.

    Args:
        model: its name.
        folder: its checkpoint.
        prompt: what is asked for.
        store: where chunks go; does not exist yet.
    """
    tier = {"kind": "filesystem", "path": str(store), "min_free": "0B"}
    with ObservedEngine(folder, [tier]) as engine:
        cold = engine.serve(prompt)
        stored = engine.side.host_keys()
        grid = _grid(engine.layout, prompt)
    lost = _most_telling(grid)
    index = lost.chunk_ending_at(len(prompt) - 1)
    key = grid.key(lost.group_id, index)
    [path] = store.rglob(f"{key_name(key)}.*")
    path.unlink()
    with ObservedEngine(folder, [tier]) as engine:
        restored = engine.serve(prompt)
        explanation = engine.explain(restored)
    return PartialHit(
        model,
        _in_words(lost, index),
        len(prompt),
        restored.loaded_tokens,
        str(explanation),
        restored.tokens == cold.tokens,
        tuple(
            _picture(grid, chunks, explanation.plan, stored, key) for chunks in grid.geometry.groups
        ),
    )


def _grid(layout: KVLayout, prompt: Sequence[int]) -> ChunkGrid:
    hasher = PrefixHasher(layout.hash_block_tokens)
    hasher.extend(prompt)
    return ChunkGrid(cut_into_chunks(layout), hasher.hashes)


def _most_telling(grid: ChunkGrid) -> GroupChunks:
    return min(grid.geometry.groups, key=lambda chunks: _TELLING.index(chunks.group.kind))


def _in_words(chunks: GroupChunks, index: int) -> str:
    span, kind = chunks.tokens(index), chunks.group.kind
    if kind is GroupKind.RECURRENT:
        return f"the state at {span.stop:,} of recurrent group {chunks.group_id}"
    return f"the chunk {span} of {kind} group {chunks.group_id}"


def _picture(
    grid: ChunkGrid,
    chunks: GroupChunks,
    plan: LoadPlan,
    stored: Collection[ChunkKey],
    removed: ChunkKey,
) -> GroupPicture:
    loaded = {
        index for load in plan.loads if load.group_id == chunks.group_id for index in load.chunks
    }

    def mark(index: int, key: ChunkKey) -> Mark:
        if key == removed:
            return Mark.REMOVED
        if index in loaded:
            return Mark.LOADED
        return Mark.STORED if key in stored else Mark.ABSENT

    keys = grid.keys(chunks.group_id)
    marks = tuple(mark(index, key) for index, key in enumerate(keys))
    return GroupPicture(chunks.group.kind, chunks.chunk_tokens, marks)
