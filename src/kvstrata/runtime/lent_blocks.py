"""A connector's holds on the engine's blocks, counted, so that they can be ended without it.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstrata.errors import KVStrataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstrata.runtime.seam import BlockTables, BlockView, SchedulerContext


class LentBlocks:
    """An engine's `SchedulerContext`, for one of several connectors.

    Args:
        context: the engine's.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._holds: Counter[int] = Counter()

    @property
    def num_held(self) -> int:
        """Holds that are not ended."""
        return self._holds.total()

    def get_block(self, block_id: int) -> BlockView:
        """What a block is now. Changes nothing."""
        return self._context.get_block(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more each."""
        block_ids = list(block_ids)
        self._context.touch(block_ids)
        self._holds.update(block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let blocks go that were held through this object.

        Raises:
            KVStrataError: one of them was not; all are held as before.
        """
        block_ids = list(block_ids)
        ended = Counter(block_ids)
        for block_id, times in ended.items():
            if times > self._holds[block_id]:
                raise KVStrataError(
                    f"block {block_id} is let go {times} times, but held {self._holds[block_id]}"
                )
        self._context.free_blocks(block_ids)
        for block_id, times in ended.items():
            self._holds[block_id] -= times
            if not self._holds[block_id]:
                del self._holds[block_id]

    def free_all(self) -> None:
        """End every hold."""
        self.free_blocks(list(self._holds.elements()))

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """The free queue, next to be taken first."""
        return self._context.iter_free_blocks(after)

    def request_blocks(self, request_id: str) -> BlockTables:
        """The blocks of a request by group."""
        return self._context.request_blocks(request_id)

    def waiting_requests(self) -> Sequence[str]:
        """The requests that wait to be scheduled, next first."""
        return self._context.waiting_requests()
