"""Blocks between the pool and requests: allot, share, give back, make findable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.ids import GroupId
from kvstrata.core.spans import ceil_div
from kvstrata.engine.cache.block_pool import NULL_BLOCK, BlockPool
from kvstrata.engine.cache.group_tables import make_table
from kvstrata.engine.cache.prefix_cache import PrefixSearch
from kvstrata.runtime.seam import OfferedState

if TYPE_CHECKING:
    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.cache.prefix_cache import LocalHit
    from kvstrata.engine.scheduling.request import Request


class RequestBlocks:
    """The block pool as requests use it.

    Ownership: scheduler thread only.

    Args:
        layout: the groups.
        num_blocks: size of the pool, the null block included.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self._search = PrefixSearch(layout, self.pool.find)

    def most_needed(self, num_tokens: int) -> int:
        """Blocks that one request of this length takes at most."""
        return sum(ceil_div(num_tokens, group.block_tokens) for group in self.layout.groups)

    def local_hit(self, request: Request) -> LocalHit:
        """The longest prefix on the device that leaves a token to compute. Changes nothing."""
        return self._search.longest(request.hashes, len(request.tokens) - 1)

    def admit(self, request: Request, hit: LocalHit, stop: int, *, is_loaded: bool) -> bool:
        """Give a request the blocks of a hit and those up to `stop`; False: too few are free.

        Args:
            request: has no blocks yet.
            hit: what to share.
            stop: where the first step, or the load, ends.
            is_loaded: whether the tokens behind the hit are loaded rather than computed.
        """
        tables = tuple(map(make_table, self.layout.groups, hit.tables))
        if is_loaded:
            for table in tables:
                table.skip_unseen(stop)
        missing = sum(table.num_missing(stop) for table in tables)
        shared = [block for blocks in hit.tables for block in blocks]
        if missing + self.pool.num_free_among(shared) > self.pool.num_free:
            return False
        self.pool.hold(shared)
        request.tables = tables
        request.computed = hit.num_tokens
        self._grow(request, stop, missing)
        return True

    def extend(self, request: Request, stop: int) -> bool:
        """Give a running request the blocks up to `stop`; False: too few are free.

        Blocks that the request no longer needs are given back first.
        """
        if stop <= min(table.covered_tokens for table in request.tables):
            return True
        for table in request.tables:
            self.pool.release(table.drop_unseen(request.computed))
        missing = sum(table.num_missing(stop) for table in request.tables)
        if missing > self.pool.num_free:
            return False
        self._grow(request, stop, missing)
        return True

    def advance(self, request: Request, computed: int) -> None:
        """Tokens up to here are computed or loaded; what became final can be found."""
        for group_id, table in enumerate(request.tables):
            for position in table.completed(request.computed, computed):
                block_id = table.blocks[position]
                if block_id != NULL_BLOCK:
                    key = self._search.key(request.hashes, GroupId(group_id), position)
                    self.pool.make_known(block_id, key)
        request.computed = computed

    def release(self, request: Request) -> None:
        """Take all blocks from a request; the end of its prefix will be taken first."""
        held = [
            (position * table.block_tokens, -group_id, block)
            for group_id, table in enumerate(request.tables)
            for position, block in enumerate(table.blocks)
            if block != NULL_BLOCK
        ]
        self.pool.release(block for _, _, block in sorted(held, reverse=True))
        request.tables = ()
        request.computed = request.loaded = 0

    def offered_states(self, request: Request, stop: int) -> tuple[OfferedState, ...]:
        """The recurrent states that a step up to `stop` leaves in blocks of their own."""
        return tuple(
            OfferedState(GroupId(group_id), table.blocks[position], stop)
            for group_id, table in enumerate(request.tables)
            if self.layout.groups[group_id].kind == "recurrent"
            for position in table.completed(stop - 1, stop)
        )

    def _grow(self, request: Request, stop: int, num_missing: int) -> None:
        fresh = iter(self.pool.take(num_missing))
        for table in request.tables:
            table.grow(stop, fresh)
