from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.layout import GroupKind, KVGroup, KVLayout
from kvstrata.errors import ConfigError
from kvstrata.planning.chunk_sizes import WANTED_CHUNK_BYTES, cut_into_chunks
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group
from kvstrata.testing.strategies import kv_layouts

MIB = 2**20


def sizes(*groups: KVGroup, limit: int | None = None, alignment: int | None = None) -> list[int]:
    layout = a_layout(*groups, hash_block=16, alignment=alignment)
    return [chunks.chunk_tokens for chunks in cut_into_chunks(layout, limit).groups]


def test_size_follows_the_bytes_of_a_token() -> None:
    light, heavy = full_group(16, page_bytes=16 * 64), full_group(16, page_bytes=16 * 128 * 1024)

    assert sizes(light) == [512]
    assert sizes(heavy) == [128]
    middle = full_group(16, page_bytes=16 * WANTED_CHUNK_BYTES // 256)
    assert sizes(middle) == [256]


def test_blocks_that_do_not_divide_each_other_need_no_common_multiple() -> None:
    groups = [full_group(n, kernel=16, page_bytes=n * 64) for n in (16, 528, 784, 1056)]

    assert sizes(*groups, limit=256) == [256, 176, 112, 176]


def test_a_block_larger_than_the_chunk_is_cut_at_kernel_blocks() -> None:
    assert sizes(full_group(1056, kernel=16, page_bytes=66 * 64), limit=400) == [352]
    assert sizes(full_group(1056, kernel=96, page_bytes=11 * 64), limit=400) == [96]


def test_a_block_that_cannot_be_cut_stays_whole() -> None:
    assert sizes(full_group(1056), limit=400) == [1056]
    assert sizes(full_group(1056, kernel=528, page_bytes=2 * 64), limit=400) == [528]


def test_a_state_is_never_cut() -> None:
    assert sizes(recurrent_group(1056), limit=16) == [1056]
    assert sizes(recurrent_group(1056, state_tokens=96), limit=16) == [96]


def test_attention_chunks_end_where_states_are() -> None:
    assert sizes(full_group(16), recurrent_group(528), limit=256) == [176, 528]
    assert sizes(full_group(16), recurrent_group(528)) == [176, 528]


def test_lining_up_is_given_up_when_chunks_would_be_tiny() -> None:
    cut = full_group(784, kernel=16, page_bytes=49 * 64)

    assert sizes(cut, recurrent_group(528), limit=256) == [112, 528]


def test_window_chunks_are_not_much_longer_than_the_window() -> None:
    assert sizes(window_group(128, 16)) == [128]
    assert sizes(window_group(5, 16)) == [16]
    assert sizes(window_group(4096, 16)) == [512]


def test_chunk_smaller_than_the_hash_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hybrid_chunk_size: 8 tokens are fewer than .* 16"):
        sizes(full_group(16), limit=8)


@given(kv_layouts(), st.none() | st.integers(1, 3000))
def test_every_layout_can_be_cut(layout: KVLayout, size: int | None) -> None:
    if size is not None:
        size = max(size, layout.hash_block_tokens)
    geometry = cut_into_chunks(layout, size)  # GroupChunks checks that chunks fit their blocks

    for chunks in geometry.groups:
        if chunks.group.kind is GroupKind.RECURRENT or size is None:
            continue
        unit = math.lcm(chunks.group.cut_tokens, layout.hash_block_tokens)
        assert chunks.chunk_tokens <= max(size, unit)
