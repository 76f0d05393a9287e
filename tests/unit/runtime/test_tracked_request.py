"""One request: the longest hit it may have, without what failed it before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.core.ids import GroupId
from kvstrata.core.lookups import ChunkLookup, LookupCodes
from kvstrata.runtime.seam import RequestLimits
from kvstrata.testing.builders import a_geometry, a_layout, full_group

from .requests import a_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey

GEOMETRY = a_geometry(a_layout(full_group(16)), 16)
FULL = GroupId(0)


def all_ready(keys: Sequence[ChunkKey]) -> LookupCodes:
    return LookupCodes(bytes([ChunkLookup.READY]) * len(keys))


def all_arriving(keys: Sequence[ChunkKey]) -> LookupCodes:
    return LookupCodes(bytes([ChunkLookup.ARRIVING]) * len(keys))


@pytest.mark.parametrize(
    ("limit", "local", "hit"),
    [(None, 0, 96), (1000, 0, 96), (50, 0, 48), (15, 0, 0), (0, 0, 0), (50, 32, 48), (10, 64, 64)],
)
def test_no_hit_is_longer_than_its_limit(limit: int | None, local: int, hit: int) -> None:
    request = a_request(GEOMETRY, 100, limits=RequestLimits(max_load_tokens=limit))

    assert request.choose(all_ready, local).num_tokens == hit


def test_what_failed_is_not_offered_again() -> None:
    request = a_request(GEOMETRY, 100)
    request.fail([request.grid.key(FULL, 3)])
    plan = request.choose(all_ready, 0)

    assert plan.num_tokens == 48
    assert [obstacle.lookup for obstacle in plan.obstacles] == [ChunkLookup.FAILED]
    assert request.choose_awaited(all_arriving, 0).num_tokens == 48


def test_only_what_was_awaited_is_lost() -> None:
    request = a_request(GEOMETRY, 100)
    awaited, other = request.grid.key(FULL, 1), request.grid.key(FULL, 3)
    request.awaited = {awaited}
    request.lose([awaited, other])

    assert request.failed == {awaited}


def test_a_preemption_leaves_what_failed() -> None:
    request = a_request(GEOMETRY, 100)
    request.plan, request.asked_at, request.is_fetched = request.choose(all_ready, 0), 1.0, True
    request.fail([request.grid.key(FULL, 3)])
    request.preempt()

    facts: list[object] = [request.plan, request.asked_at, request.is_fetched]
    assert facts == [None, None, False]
    assert request.choose(all_ready, 0).num_tokens == 48


def test_chunks_of_a_plan_come_in_the_order_of_their_tokens() -> None:
    request = a_request(GEOMETRY, 100)
    labels = request.labels(request.choose(all_ready, 0))

    assert [label.tokens.stop for label in labels] == [16, 32, 48, 64, 80, 96]
