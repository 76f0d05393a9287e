"""The pool of blocks that all groups share.

A block is *held* by as many as its reference count says, or *free*. A free block may still be
*known*: it can be found by its key (prefix hash and group) until it is taken for something else.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.ids import ChunkKey, key_group, key_hash
from kvstrata.engine.cache.free_queue import FreeQueue
from kvstrata.errors import LayoutError
from kvstrata.runtime.seam import BlockView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NULL_BLOCK: Final = 0
"""Stands for no block. Its memory is real, never read and never written on purpose."""


class BlockPool:
    """Blocks 1 to num_blocks - 1, and the null block.

    Args:
        num_blocks: the null block included.

    Raises:
        LayoutError: there would be no block besides the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 1:
            raise LayoutError(f"num_blocks is {num_blocks}, but must be at least 2")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[ChunkKey | None] = [None] * num_blocks
        self._known: dict[ChunkKey, int] = {}
        self._free = FreeQueue()
        for block_id in range(1, num_blocks):
            self._free.append(block_id)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def find(self, key: ChunkKey) -> int | None:
        """The block with this content, held or free. Changes nothing."""
        return self._known.get(key)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these are free now."""
        return sum(self._ref_counts[b] == 0 for b in block_ids if b != NULL_BLOCK)

    def take(self, count: int) -> list[int]:
        """Hold blocks from the front of the free queue; what was known of them is forgotten."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more each; the null block is passed over."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Let blocks go; those that nobody holds become free, in this order.

        Known ones go to the back of the queue, the others, which are of no use, to its front.

        Raises:
            ValueError: a block is not held.
        """
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is not held")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._make_free(block_id)

    def make_known(self, block_id: int, key: ChunkKey) -> None:
        """A held block's content is final; it can be found from now on.

        If another block has the same content, that one stays the one to be found.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not held"
        if self._keys[block_id] is None and key not in self._known:
            self._keys[block_id] = key
            self._known[key] = block_id

    def forget_all(self) -> None:
        """Nothing can be found any more; held blocks stay held."""
        for block_id in list(self._known.values()):
            self._forget(block_id)

    def view(self, block_id: int) -> BlockView:
        """What a block is now."""
        key = self._keys[block_id]
        return BlockView(
            block_id,
            self._ref_counts[block_id],
            None if key is None else key_hash(key),
            None if key is None else key_group(key),
            is_null=block_id == NULL_BLOCK,
            place=self._free.place(block_id),
        )

    def walk_free(self, after: int | None = None) -> Iterator[BlockView]:
        """The free queue from its front, or behind a place; it may change during the walk."""
        return map(self.view, self._free.walk(after))

    def check_invariants(self) -> None:
        """Every block is held or free, never both; what is known can be found."""
        for block_id in range(1, self.num_blocks):
            is_free = self._free.place(block_id) is not None
            assert is_free == (self._ref_counts[block_id] == 0), f"block {block_id}"
            key = self._keys[block_id]
            assert key is None or self._known[key] == block_id, f"block {block_id}"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is held"
        assert self._free.place(NULL_BLOCK) is None, "the null block is free"
        assert len(self._known) == sum(key is not None for key in self._keys)

    def _make_free(self, block_id: int) -> None:
        if self._keys[block_id] is None:
            self._free.prepend(block_id)
        else:
            self._free.append(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._known[key]
            self._keys[block_id] = None
