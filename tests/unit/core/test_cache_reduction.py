"""Refusals and edge cases, on plain numbers. Copies through real tensors: test_cache_views."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.cache_reduction import reduce_kv_caches
from kvstrata.core.canonical import BytePiece, TensorView
from kvstrata.errors import LayoutError
from kvstrata.testing.builders import a_layout, full_group, recurrent_group

if TYPE_CHECKING:
    from kvstrata.core.layout import KVLayout

BLOCKS, PAGE = 6, 1024


def view(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    storage_bytes: int | None = None,
    block_axis: int | None = None,
) -> TensorView:
    """A tensor of bytes."""
    dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    strides = strides or dense
    end = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    return TensorView(1, storage_bytes or end, offset, shape, strides, "uint8", 1, block_axis)


def layout(*names: str) -> KVLayout:
    return a_layout(full_group(16, layers=names, page_bytes=PAGE))


def refusal(layout: KVLayout, caches: dict[str, list[TensorView]], num_blocks: int = BLOCKS) -> str:
    with pytest.raises(LayoutError) as caught:
        reduce_kv_caches(layout, caches, num_blocks)
    return str(caught.value)


def test_a_pool_without_blocks_is_refused() -> None:
    assert "num_blocks is 0" in refusal(layout("a"), {"a.0": [view(1, PAGE)]}, 0)


def test_a_missing_cache_is_refused() -> None:
    assert refusal(layout("a"), {}) == ("layer 'a.0': expected a cache, the engine registered none")


def test_a_cache_that_no_group_names_is_refused() -> None:
    caches = {"a.0": [view(BLOCKS, PAGE)], "b": [view(BLOCKS, PAGE, offset=BLOCKS * PAGE)]}

    assert "layer 'b'" in refusal(layout("a"), caches)


def test_an_ambiguous_block_axis_is_refused_unless_declared() -> None:
    cache = view(2, 2, PAGE // 2)
    assert "one axis of 2 kernel blocks, or a declared" in refusal(layout("a"), {"a.0": [cache]}, 2)

    for axis, strides in ((0, PAGE), (1, PAGE // 2)):
        declared = view(2, 2, PAGE // 2, block_axis=axis)
        canonical = reduce_kv_caches(layout("a"), {"a.0": [declared]}, 2)
        assert {matrix.row_stride for matrix in canonical.matrices} == {strides}


@pytest.mark.parametrize("axis", [1, 5])
def test_a_declared_block_axis_must_fit(axis: int) -> None:
    cache = view(BLOCKS, PAGE, block_axis=axis)

    assert f"6 kernel blocks on axis {axis}" in refusal(layout("a"), {"a.0": [cache]})


def test_heads_outside_blocks_need_a_declared_axis() -> None:
    cache = view(4, BLOCKS, PAGE // 4, block_axis=1)

    canonical = reduce_kv_caches(layout("a"), {"a.0": [cache]}, BLOCKS)

    assert canonical.groups[0].pieces == tuple(BytePiece(i, 0, PAGE // 4) for i in range(4))
    assert "on axis 0" in refusal(layout("a"), {"a.0": [view(4, BLOCKS, PAGE // 4)]})


def test_a_padded_state_is_trimmed_to_its_real_bytes() -> None:
    canonical = reduce_kv_caches(
        a_layout(recurrent_group(16)), {"recurrent.0": [view(BLOCKS, 1, 1, 5000)]}, BLOCKS
    )

    assert canonical.groups[0].pieces == (BytePiece(0, 0, 4096),)
    assert canonical.matrices[0].row_stride == 5000


@pytest.mark.parametrize(
    "cache",
    [
        replace(view(BLOCKS, 8, 1024), dtype="float8_e4m3fn"),
        view(BLOCKS, 8, 1024),
    ],
)
def test_a_state_with_a_shape_is_never_trimmed(cache: TensorView) -> None:
    message = refusal(a_layout(recurrent_group(16)), {"recurrent.0": [cache]})

    assert "expected 4096 bytes per kernel block" in message


def test_padding_inside_an_attention_page_is_refused() -> None:
    assert "expected 1024 bytes per kernel block" in refusal(
        layout("a"), {"a.0": [view(BLOCKS, PAGE + 8)]}
    )


def test_elements_that_share_bytes_are_refused() -> None:
    crossed = view(BLOCKS, 4, 4, PAGE // 16, strides=(PAGE, 96, 64, 1))

    assert "elements that do not overlap" in refusal(layout("a"), {"a.0": [crossed]})


def test_a_tensor_beyond_its_storage_is_refused() -> None:
    cache = view(BLOCKS, PAGE, storage_bytes=BLOCKS * PAGE - 1)

    assert "at least 6144 bytes of storage, found 6143" in refusal(layout("a"), {"a.0": [cache]})


def test_layers_of_one_group_on_the_same_bytes_are_refused() -> None:
    cache = [view(BLOCKS, PAGE)]

    message = refusal(layout("a", "b"), {"a.0": cache, "b.0": cache})

    assert "layers 'a.0' and 'b.0' (full group) share bytes [0, 1024) of each row" in message


def test_layers_of_one_group_that_interleave_are_refused() -> None:
    one = view(BLOCKS, PAGE, strides=(2 * PAGE, 1))
    other = view(BLOCKS, PAGE, strides=(3 * PAGE, 1), offset=PAGE)

    message = refusal(layout("a", "b"), {"a.0": [one], "b.0": [other]})

    assert "rows interleave in bytes" in message


def test_one_block_is_enough() -> None:
    canonical = reduce_kv_caches(layout("a"), {"a.0": [view(1, PAGE)]}, 1)

    assert canonical.matrices[0].end == PAGE
    assert canonical.groups[0].row_bytes == PAGE
