from __future__ import annotations

import pytest

from kvstrata.core.ids import BlockHash, ChunkKey, GroupId, chunk_key
from kvstrata.engine.cache.block_pool import NULL_BLOCK, BlockPool
from kvstrata.errors import LayoutError
from kvstrata.runtime.seam import BlockView


def a_key(number: int, group_id: int = 0) -> ChunkKey:
    return chunk_key(BlockHash(bytes([number])), GroupId(group_id))


def free(pool: BlockPool) -> list[int]:
    return [view.block_id for view in pool.walk_free()]


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(LayoutError, match=f"num_blocks is {num_blocks}, but must be at least 2"):
        BlockPool(num_blocks)


def test_all_blocks_but_the_null_block_are_free_at_first() -> None:
    pool = BlockPool(4)
    assert free(pool) == [1, 2, 3]
    assert pool.num_free == 3


def test_taken_blocks_are_held_once_and_not_free() -> None:
    pool = BlockPool(4)
    assert pool.take(2) == [1, 2]
    assert free(pool) == [3]
    assert [pool.view(block).ref_count for block in range(4)] == [0, 1, 1, 0]


def test_more_blocks_than_are_free_cannot_be_taken() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 are free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    [block] = pool.take(1)
    pool.hold([block])
    pool.release([block])
    assert block not in free(pool)
    pool.release([block])
    assert block in free(pool)


def test_a_block_that_nobody_holds_cannot_be_released() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="block 2 is not held"):
        pool.release([2])


def test_the_null_block_is_passed_over() -> None:
    pool = BlockPool(3)
    pool.hold([NULL_BLOCK])
    pool.release([NULL_BLOCK, NULL_BLOCK])
    assert pool.num_free_among([NULL_BLOCK, 1]) == 1
    assert pool.view(NULL_BLOCK).is_null
    assert pool.view(NULL_BLOCK).ref_count == 0
    pool.check_invariants()


def test_a_known_block_is_found_held_or_free_until_it_is_taken() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.make_known(block, a_key(1))
    assert pool.find(a_key(1)) == block
    pool.release([block])
    assert pool.find(a_key(1)) == block
    pool.take(1)
    assert pool.find(a_key(1)) is None
    assert pool.view(block).block_hash is None


def test_keys_of_two_groups_are_two_keys() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.make_known(first, a_key(1, group_id=0))
    pool.make_known(second, a_key(1, group_id=1))
    assert pool.find(a_key(1, group_id=0)) == first
    assert pool.find(a_key(1, group_id=1)) == second


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.make_known(first, a_key(1))
    pool.make_known(second, a_key(1))
    assert pool.find(a_key(1)) == first
    assert pool.view(second).block_hash is None
    pool.check_invariants()


def test_a_block_keeps_its_first_key() -> None:
    pool = BlockPool(3)
    [block] = pool.take(1)
    pool.make_known(block, a_key(1))
    pool.make_known(block, a_key(2))
    assert pool.find(a_key(1)) == block
    assert pool.find(a_key(2)) is None


def test_a_free_block_cannot_become_known() -> None:
    with pytest.raises(AssertionError, match="block 1 is not held"):
        BlockPool(3).make_known(1, a_key(1))


def test_blocks_without_content_are_taken_before_known_ones() -> None:
    pool = BlockPool(5)
    blocks = pool.take(4)
    pool.make_known(blocks[1], a_key(1))
    pool.make_known(blocks[3], a_key(3))
    pool.release(blocks)
    assert free(pool) == [3, 1, 2, 4]


def test_of_known_blocks_the_one_unused_for_longest_is_taken_first() -> None:
    pool = BlockPool(4)
    for block in pool.take(3):
        pool.make_known(block, a_key(block))
    pool.release([2, 1, 3])
    pool.hold([2])
    pool.release([2])
    assert pool.take(3) == [1, 3, 2]


def test_a_free_block_that_is_held_again_keeps_its_content() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.make_known(block, a_key(1))
    pool.release([block])
    pool.hold([block])
    assert pool.num_free == 0
    assert pool.find(a_key(1)) == block


def test_a_forgotten_cache_leaves_holders_their_blocks() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    for block in blocks:
        pool.make_known(block, a_key(block))
    pool.release(blocks[:1])
    pool.forget_all()
    assert [pool.find(a_key(block)) for block in blocks] == [None, None]
    assert [pool.view(block).ref_count for block in blocks] == [0, 1]
    pool.check_invariants()


def test_a_view_says_what_a_block_is() -> None:
    pool = BlockPool(3)
    [block] = pool.take(1)
    pool.make_known(block, a_key(7, group_id=2))
    assert pool.view(block) == BlockView(block, 1, BlockHash(b"\x07"), GroupId(2), is_null=False)
    pool.release([block])
    assert pool.view(block).ref_count == 0
    assert pool.view(block).place is not None


def test_a_walk_goes_on_behind_a_view_whose_block_has_been_taken() -> None:
    pool = BlockPool(5)
    walk = pool.walk_free()
    next(walk)
    second = next(walk)
    pool.take(2)
    assert [view.block_id for view in pool.walk_free(second.place)] == [3, 4]


def test_free_blocks_are_counted_among_others() -> None:
    pool = BlockPool(4)
    pool.take(1)
    assert pool.num_free_among([1, 2, 3]) == 2
