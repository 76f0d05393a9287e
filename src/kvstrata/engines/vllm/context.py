"""vLLM's block pool and cache manager, as a `SchedulerContext`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata.core.ids import BlockHash
from kvstrata.runtime.seam import BlockView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvstrata.engines.vllm.layout import GroupMap
    from kvstrata.runtime.seam import BlockTables

_GROUP_BYTES = 4
"""vLLM appends its group id to a block's hash."""


class VllmContext:
    """Scheduler thread only.

    Args:
        manager: vLLM's cache manager.
        groups: whose tables are ours.
        requests: the requests that live, in the order of their arrival.
    """

    def __init__(
        self, manager: KVCacheManager, groups: GroupMap, requests: Mapping[str, Request]
    ) -> None:
        self._manager = manager
        self._pool: BlockPool = manager.block_pool
        self._groups = groups
        self._requests = requests

    def get_block(self, block_id: int) -> BlockView:
        """What a block is now."""
        return self._view(self._pool.blocks[block_id])

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more each."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let held blocks go."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """The free queue; from the front if that block has left it."""
        cursor = None if after is None else self._pool.blocks[after.block_id]
        if cursor is not None and cursor.ref_cnt:
            cursor = None
        return map(self._view, self._walk(cursor))

    def request_blocks(self, request_id: str) -> BlockTables:
        """The blocks of a request, by our groups."""
        return self._groups.tables(self._manager.get_block_ids(request_id))

    def waiting_requests(self) -> Sequence[str]:
        """The requests that wait, oldest first: vLLM's own order is not told."""
        return [name for name, request in self._requests.items() if _is_waiting(request)]

    def _walk(self, cursor: KVCacheBlock | None) -> Iterator[Any]:
        """The free blocks behind a cursor; the queue may change during the walk."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head if cursor is None else cursor
        while (block := block.next_free_block) is not None and block.next_free_block is not None:
            yield block

    def _view(self, block: KVCacheBlock) -> BlockView:
        known = block.block_hash
        return BlockView(
            block.block_id,
            block.ref_cnt,
            None if known is None else BlockHash(known[:-_GROUP_BYTES]),
            None if known is None else self._group(known),
            block.is_null,
        )

    def _group(self, known: bytes) -> Any:  # noqa: ANN401 - a GroupId or None
        return self._groups.ours(int.from_bytes(known[-_GROUP_BYTES:], "big"))


def follow_resets(
    pool: BlockPool, let_blocks_go: Callable[[], None], was_reset: Callable[[], None]
) -> None:
    """Take part when vLLM resets its prefix cache, of which it tells no connector.

    It refuses to while anybody holds a block, so ours are let go of first. Afterwards it tells its
    readers that nothing is cached any more.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        let_blocks_go()
        is_reset = bool(reset())
        if is_reset:
            was_reset()
        return is_reset

    pool.reset_prefix_cache = reset_prefix_cache


def _is_waiting(request: Request) -> bool:
    return request.status.name in ("WAITING", "PREEMPTED")
