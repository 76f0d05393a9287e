"""The engine's side of `SchedulerContext`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstrata.engine.scheduling.request import Request
    from kvstrata.engine.scheduling.request_blocks import RequestBlocks
    from kvstrata.runtime.seam import BlockTables, BlockView


class EngineContext:
    """Blocks and queues of one scheduler. Scheduler thread only.

    Args:
        blocks: the pool.
        requests: the living requests.
        waiting: the queue's request ids, next first.
    """

    def __init__(
        self,
        blocks: RequestBlocks,
        requests: Mapping[str, Request],
        waiting: Callable[[], Sequence[str]],
    ) -> None:
        self._blocks = blocks
        self._requests = requests
        self._waiting = waiting

    def get_block(self, block_id: int) -> BlockView:
        """What a block is now."""
        return self._blocks.pool.view(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more each."""
        self._blocks.pool.hold(block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let held blocks go."""
        self._blocks.pool.release(block_ids)

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """The free queue; behind `after`, where that block stood when it was seen."""
        return self._blocks.pool.walk_free(None if after is None else after.place)

    def request_blocks(self, request_id: str) -> BlockTables:
        """The blocks of a request by group."""
        request = self._requests.get(request_id)
        if request is None or not request.tables:
            return tuple(() for _ in self._blocks.layout.groups)
        return tuple(tuple(table.blocks) for table in request.tables)

    def waiting_requests(self) -> Sequence[str]:
        """The requests that wait, next first."""
        return self._waiting()
