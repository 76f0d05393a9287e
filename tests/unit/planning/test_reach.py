from __future__ import annotations

import re
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
    assert "full group 0 has its chunks complete at 4096 tokens" in message
    assert "a hybrid_chunk_size such as 992" in message
    require_reach(cut_into_chunks(a_layout(full_group(16)), 992), 1000)


def test_blocks_too_large_are_named_when_no_chunk_size_helps() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16), window_group(64, 4096), hash_block=16))

    with pytest.raises(ConfigError, match="smaller blocks than 4096 tokens"):
        require_reach(geometry, 1000)


def test_a_remedy_that_is_named_helps() -> None:
    layout = a_layout(full_group(48), recurrent_group(528), hash_block=16)

    with pytest.raises(ConfigError, match=r"such as (\d+)") as caught:
        require_reach(cut_into_chunks(layout, 240), 561)
    found = re.search(r"such as (\d+)", str(caught.value))
    assert found is not None
    require_reach(cut_into_chunks(layout, int(found[1])), 561)


def test_an_alignment_that_is_too_coarse_is_named() -> None:
    geometry = cut_into_chunks(a_layout(full_group(16), alignment=1024))

    with pytest.raises(ConfigError, match=r"takes hits at multiples of 1024 alone.*smaller hit"):
        require_reach(geometry, 512)
