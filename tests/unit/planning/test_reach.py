from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from kvstrata.errors import ConfigError
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.load_plan import LoadBounds, choose_load
from kvstrata.planning.reach import first_hit, require_reach
from kvstrata.testing.builders import (
    a_layout,
    full_group,
    lookups_with,
    recurrent_group,
    window_group,
)
from kvstrata.testing.strategies import chunk_geometries

if TYPE_CHECKING:
    from kvstrata.core.chunk_grid import ChunkGeometry


def possible_hit(geometry: ChunkGeometry, num_tokens: int) -> int:
    hashed = num_tokens - num_tokens % geometry.layout.hash_block_tokens
    return choose_load(geometry, lookups_with(geometry, hashed), LoadBounds(num_tokens)).num_tokens


@given(chunk_geometries())
def test_first_hit_is_the_first_the_planner_gives(geometry: ChunkGeometry) -> None:
    first = first_hit(geometry)
    if first.prompt_tokens > 20_000:
        return

    assert possible_hit(geometry, first.prompt_tokens) >= first.hit_tokens
    assert possible_hit(geometry, first.prompt_tokens - 1) == 0


def test_enough_room_is_accepted() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16), recurrent_group(528)))

    require_reach(geometry, 529)
    with pytest.raises(ConfigError):
        require_reach(geometry, 528)


def test_states_too_far_apart_are_named_with_the_remedy() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16), recurrent_group(528), recurrent_group(784)))

    with pytest.raises(ConfigError) as caught:
        require_reach(geometry, 8192)
    message = str(caught.value)
    assert "25872 tokens" in message
    assert "[528, 784]" in message
    assert "8192" in message
    assert "smaller blocks for the recurrent groups" in message


def test_chunks_too_large_are_named_with_the_setting() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16)), 4096)

    with pytest.raises(ConfigError) as caught:
        require_reach(geometry, 1000)
    message = str(caught.value)
    assert message.startswith("hybrid_chunk_size: nothing can ever be stored")
    assert "full group 0 is complete at 4096 tokens" in message
    assert "hybrid_chunk_size of at most 1000" in message
    require_reach(cut_into_chunks(a_layout(full_group(16)), 1000), 1000)


def test_blocks_too_large_are_named_when_no_chunk_size_helps() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16), window_group(64, 4096), hash_block=16))

    with pytest.raises(ConfigError, match="smaller blocks than 4096 tokens"):
        require_reach(geometry, 1000)
