"""Requests, a pool and a host index without an engine, for tests of what decides about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import chunk_key
from kvstrata.engine.cache.block_pool import BlockPool
from kvstrata.policies.lru import LruPolicy
from kvstrata.runtime.seam import NewRequest, RequestLimits
from kvstrata.runtime.tracked_request import TrackedRequest
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.tiers.room import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.core.ids import GroupId
    from kvstrata.runtime.seam import BlockTables, BlockView


def a_request(
    geometry: ChunkGeometry,
    num_tokens: int,
    *,
    name: str = "request",
    num_prompt_tokens: int | None = None,
    limits: RequestLimits | None = None,
) -> TrackedRequest:
    """A request whose tokens count up from zero."""
    hasher = PrefixHasher(geometry.layout.hash_block_tokens)
    hasher.extend(range(num_tokens))
    new = NewRequest(
        name,
        hasher.hashes,
        list(range(num_tokens)),
        num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        limits=limits or RequestLimits(),
    )
    return TrackedRequest(new, geometry)


def a_host(num_pages: int = 1000) -> HostMemoryIndex:
    return HostMemoryIndex(num_pages * PAGE_BYTES, LruPolicy(num_pages * PAGE_BYTES))


class PoolContext:
    """An engine's real block pool, with tables that a test sets."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTables] = {}

    def complete(self, request: TrackedRequest, group_id: GroupId, blocks: Sequence[int]) -> None:
        """These are a request's first blocks of a group, and their content is final."""
        size = request.grid.geometry.groups[group_id].group.block_tokens
        for position, block in enumerate(blocks):
            end = (position + 1) * size
            self.pool.make_known(block, chunk_key(request.grid.hash_before(end), group_id))

    def get_block(self, block_id: int) -> BlockView:
        return self.pool.view(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        self.pool.hold(block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        self.pool.release(block_ids)

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        return self.pool.walk_free(None if after is None else after.place)

    def request_blocks(self, request_id: str) -> BlockTables:
        return self.tables[request_id]

    def waiting_requests(self) -> Sequence[str]:
        return ()
