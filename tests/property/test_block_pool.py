"""The block pool as a state machine against plain lists, with walks that changes interrupt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.engine.cache.block_pool import NULL_BLOCK, BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.runtime.seam import BlockView

KEYS = [
    chunk_key(BlockHash(bytes([n])), GroupId(group_id)) for n in range(8) for group_id in range(2)
]


@dataclass
class Walk:
    """A walk that is under way, or a place that a later one goes on behind."""

    walk: Iterator[BlockView]
    behind: set[int] = field(default_factory=set)
    """Blocks that have stood behind the walk ever since; it must not skip them."""


class PoolMachine(RuleBasedStateMachine):
    """Takes, holds and releases in any order. The model: counts, a queue, and names."""

    @initialize(num_blocks=st.integers(3, 12))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.counts = dict.fromkeys(range(1, num_blocks), 0)
        self.queue = list(range(1, num_blocks))
        self.keys: dict[int, ChunkKey] = {}
        self.walks: list[Walk] = []
        self.seen: list[tuple[BlockView, set[int]]] = []
        """Views that walks gave, and what has stood behind each ever since."""

    def held(self) -> list[int]:
        return [block for block, count in self.counts.items() if count]

    def leave(self, block: int) -> None:
        """A block is no longer free."""
        self.queue.remove(block)
        for behind in self.obligations():
            behind.discard(block)

    def join(self, block: int) -> None:
        """A block is free: at the back if it can be found, else at the front."""
        if block not in self.keys:
            self.queue.insert(0, block)
            return
        self.queue.append(block)
        for behind in self.obligations():
            behind.add(block)

    def obligations(self) -> list[set[int]]:
        return [walk.behind for walk in self.walks] + [behind for _, behind in self.seen]

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(4, len(self.queue))))
        expected = self.queue[:count]
        assert self.pool.take(count) == expected
        for block in expected:
            self.leave(block)
            self.counts[block] = 1
            self.keys.pop(block, None)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from([NULL_BLOCK, *self.counts]), max_size=4))
        self.pool.hold(blocks)
        for block in filter(None, blocks):
            if not self.counts[block]:
                self.leave(block)
            self.counts[block] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.lists(st.sampled_from([NULL_BLOCK, *self.held()]), unique=True)))

    def let_go(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in filter(None, blocks):
            self.counts[block] -= 1
            if not self.counts[block]:
                self.join(block)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def release_what_is_free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.queue))
        with pytest.raises(ValueError, match=f"block {block} is not held"):
            self.pool.release([block])

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def make_known(self, data: st.DataObject, key: ChunkKey) -> None:
        self.name(data.draw(st.sampled_from(self.held())), key)

    def name(self, block: int, key: ChunkKey) -> None:
        self.pool.make_known(block, key)
        if block not in self.keys and key not in self.keys.values():
            self.keys[block] = key

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def come_and_go(self, data: st.DataObject, keys: list[ChunkKey]) -> None:
        """Blocks are taken, filled and released at once."""
        before = self.held()
        self.take(data)
        taken = [block for block in self.held() if block not in before]
        for block, key in zip(taken, keys, strict=False):
            self.name(block, key)
        self.let_go(taken[::-1])

    @precondition(lambda self: len(self.keys) > 3)
    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.keys.clear()

    @rule()
    def begin_walk(self) -> None:
        self.walks.append(Walk(self.pool.walk_free(), set(self.queue)))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def walk_on_behind(self, data: st.DataObject) -> None:
        """Go on where an earlier walk was, whatever has become of that block."""
        view, behind = data.draw(st.sampled_from(self.seen))
        self.walks.append(Walk(self.pool.walk_free(view.place), set(behind)))

    @precondition(lambda self: self.walks)
    @rule(data=st.data(), count=st.integers(1, 5))
    def walk(self, data: st.DataObject, count: int) -> None:
        walk = data.draw(st.sampled_from(self.walks))
        for _ in range(count):
            view = next(walk.walk, None)
            if view is None:
                assert not walk.behind, "a block was skipped"
                self.walks.remove(walk)
                return
            place = self.queue.index(view.block_id)
            assert not walk.behind & set(self.queue[:place]), "a block was skipped"
            walk.behind.discard(view.block_id)
            self.seen = [*self.seen[-3:], (view, set(self.queue[place + 1 :]))]

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert [view.block_id for view in self.pool.walk_free()] == self.queue
        assert self.pool.num_free == len(self.queue)
        assert self.pool.num_free_among([NULL_BLOCK, *self.counts]) == len(self.queue)
        assert {self.pool.view(b).ref_count for b in (NULL_BLOCK, *self.queue)} == {0}
        for block, count in self.counts.items():
            assert self.pool.view(block).ref_count == count
        found = {self.pool.find(key): key for key in KEYS}
        found.pop(None, None)
        assert found == self.keys

    @invariant()
    def blocks_without_content_are_taken_first(self) -> None:
        if hasattr(self, "pool"):
            is_known = [view.block_hash is not None for view in self.pool.walk_free()]
            assert is_known == sorted(is_known)

    def teardown(self) -> None:
        for walk in getattr(self, "walks", []):
            rest = [view.block_id for view in walk.walk]
            assert walk.behind <= set(rest), "a block was skipped"
            assert rest == [block for block in self.queue if block in rest]


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=25)
