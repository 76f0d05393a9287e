from __future__ import annotations

import pytest

from kvstrata.engine.cache.free_queue import FreeQueue


def a_queue(*block_ids: int) -> FreeQueue:
    queue = FreeQueue()
    for block_id in block_ids:
        queue.append(block_id)
    return queue


def test_blocks_are_taken_in_the_order_they_joined() -> None:
    queue = a_queue(3, 1, 2)
    assert [queue.pop() for _ in range(3)] == [3, 1, 2]
    assert len(queue) == 0


def test_a_block_that_joins_at_the_front_is_taken_next() -> None:
    queue = a_queue(1, 2)
    queue.prepend(3)
    queue.prepend(4)
    assert list(queue.walk()) == [4, 3, 1, 2]
    assert queue.pop() == 4


def test_a_block_leaves_from_anywhere() -> None:
    queue = a_queue(1, 2, 3)
    queue.remove(2)
    assert list(queue.walk()) == [1, 3]
    assert queue.place(2) is None
    assert len(queue) == 2


def test_a_block_that_is_taken_has_no_place() -> None:
    queue = a_queue(1)
    queue.pop()
    assert queue.place(1) is None


def test_a_block_joins_once() -> None:
    queue = a_queue(1)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        queue.append(1)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        queue.prepend(1)


def test_places_grow_towards_the_back() -> None:
    queue = a_queue(1, 2)
    queue.prepend(3)
    places = [queue.place(block) for block in queue.walk()]
    assert None not in places
    assert places == sorted(place for place in places if place is not None)


def test_a_walk_goes_on_behind_a_block_that_has_left() -> None:
    queue = a_queue(1, 2, 3)
    place = queue.place(2)
    queue.remove(2)
    assert list(queue.walk(place)) == [3]


def test_a_walk_goes_on_where_a_block_stood_before_it_came_back() -> None:
    queue = a_queue(1, 2, 3)
    place = queue.place(2)
    queue.remove(2)
    queue.append(2)
    assert list(queue.walk(place)) == [3, 2]
    queue.remove(2)
    queue.prepend(2)
    assert list(queue.walk(place)) == [3]


def test_a_place_is_not_used_again_when_the_queue_was_empty() -> None:
    queue = a_queue(1)
    place = queue.place(1)
    queue.pop()
    queue.append(1)
    assert list(queue.walk(place)) == [1]


def test_blocks_may_come_and_go_during_a_walk() -> None:
    queue = a_queue(1, 2, 3, 4)
    walk = queue.walk()
    assert next(walk) == 1
    queue.remove(1)
    queue.remove(3)
    queue.append(1)
    queue.prepend(3)
    assert list(walk) == [2, 4, 1]


def test_a_walk_ends_when_all_others_have_left() -> None:
    queue = a_queue(1, 2)
    walk = queue.walk()
    assert next(walk) == 1
    queue.remove(2)
    assert list(walk) == []
