"""Every way engines lay out KV caches: filled through their own shapes, copied through ours."""

from __future__ import annotations

import pytest
import torch

from kvstrata.core.ids import GroupId
from kvstrata.core.spans import RowSpan
from kvstrata.errors import LayoutError
from kvstrata.transfers.cache_views import CacheViews, LayerCache
from kvstrata.transfers.copy_plans import device_rows

from .cache_layouts import (
    BLOCKS,
    CASES,
    DIM,
    HEADS,
    KV_PAGE,
    OVERLAID,
    TOKENS,
    Case,
    all_bytes,
    fill,
    full,
    layers_in_blocks,
    layout_of,
    overlaid_groups,
    padded_pages,
    parts,
    plain,
    two_layers,
)


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def block_of(case: Case, name: str, cache: LayerCache, block: int) -> list[torch.Tensor]:
    """One block of one layer, read through the tensor's own shape."""
    rows = slice(block * case.kernel_rows, (block + 1) * case.kernel_rows)
    view = case.by_block.get(name)
    blocks = [view(t, block) if view else t[rows] for t in parts(cache)]
    return [tensor.float() for tensor in blocks]


def test_blocks_survive_the_way_into_another_cache(case: Case) -> None:
    source, target = case.make(), case.make()
    source_views = CacheViews(case.layout, source, BLOCKS)
    target_views = CacheViews(case.layout, target, BLOCKS)
    for index, group in enumerate(case.layout.groups):
        for seed, layer in enumerate(group.layers):
            fill(source[layer.name], seed)
            fill(target[layer.name], seed + 100)
        untouched = {
            layer.name: block_of(case, layer.name, target[layer.name], 0) for layer in group.layers
        }
        untouched = {name: [t.clone() for t in tensors] for name, tensors in untouched.items()}
        rows = group.rows_per_block
        taken = device_rows([4, 1], RowSpan(0, 2 * rows), rows)
        placed = device_rows([2, 5], RowSpan(0, 2 * rows), rows)

        payload = source_views.gather(GroupId(index), taken)
        target_views.scatter(GroupId(index), placed, payload)

        assert payload.numel() == 2 * group.block_bytes
        for layer in group.layers:
            for there, here in ((4, 2), (1, 5)):
                expected = block_of(case, layer.name, source[layer.name], there)
                found = block_of(case, layer.name, target[layer.name], here)
                assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            found = block_of(case, layer.name, target[layer.name], 0)
            assert all(torch.equal(a, b) for a, b in zip(untouched[layer.name], found, strict=True))


def test_copying_a_block_onto_itself_changes_no_byte(case: Case) -> None:
    caches = case.make()
    for seed, cache in enumerate(caches.values()):
        fill(cache, seed)
    views = CacheViews(case.layout, caches, BLOCKS)
    before = all_bytes(caches)

    for index, group in enumerate(case.layout.groups):
        rows = device_rows(
            range(BLOCKS), RowSpan(0, BLOCKS * group.rows_per_block), group.rows_per_block
        )
        views.scatter(GroupId(index), rows, views.gather(GroupId(index), rows))

    assert all_bytes(caches) == before


def test_padding_is_neither_read_nor_written() -> None:
    caches = padded_pages()
    views = CacheViews(two_layers(), caches, BLOCKS)
    before = all_bytes(caches)

    payload = torch.full((2 * KV_PAGE,), 7, dtype=torch.uint8)
    views.scatter(GroupId(0), [3], payload)

    assert views.gather(GroupId(0), [3]).tolist() == payload.tolist()
    assert sum(a != b for a, b in zip(before, all_bytes(caches), strict=True)) == 2 * KV_PAGE


def test_part_of_a_block_is_copied_alone() -> None:
    case = CASES["blocks of several kernel blocks"]
    source, target = case.make(), case.make()
    for seed, name in enumerate(source):
        fill(source[name], seed)
    rows = device_rows([4], RowSpan(1, 2), 3)

    payload = CacheViews(case.layout, source, BLOCKS).gather(GroupId(0), rows)
    CacheViews(case.layout, target, BLOCKS).scatter(GroupId(0), rows, payload)

    assert rows == [13]
    for name in source:
        there, here = parts(source[name])[0], parts(target[name])[0]
        assert torch.equal(here[13], there[13])
        assert not here[:13].any()
        assert not here[14:].any()


def test_layers_beside_each_other_become_one_matrix() -> None:
    canonical = CacheViews(two_layers(), layers_in_blocks(), BLOCKS).canonical

    (matrix,) = canonical.matrices
    assert (matrix.num_rows, matrix.row_bytes, matrix.row_stride) == (
        BLOCKS,
        2 * KV_PAGE,
        2 * KV_PAGE,
    )
    assert [(p.start, p.length) for p in canonical.groups[0].pieces] == [
        (0, KV_PAGE),
        (KV_PAGE, KV_PAGE),
    ]


def test_overlaid_groups_share_matrices() -> None:
    canonical = CacheViews(OVERLAID, overlaid_groups(), BLOCKS).canonical

    assert len(canonical.matrices) == 2
    assert [group.row_bytes for group in canonical.groups] == [4 * KV_PAGE, 4 * KV_PAGE, 600]


def test_encoding_tells_arrangements_apart_but_not_pools() -> None:
    def encoding(*shape: int, blocks: int = BLOCKS) -> str:
        return CacheViews(two_layers(), plain(*shape), blocks).canonical.page_encoding

    tokens_first = encoding(BLOCKS, TOKENS, HEADS, 2 * DIM)
    assert tokens_first != encoding(BLOCKS, HEADS, TOKENS, 2 * DIM)
    assert tokens_first == encoding(9, TOKENS, HEADS, 2 * DIM, blocks=9)
    assert encoding(2, BLOCKS, TOKENS, HEADS, DIM) == encoding(2, 9, TOKENS, HEADS, DIM, blocks=9)


def test_encoding_tells_payload_orders_apart() -> None:
    """The same shape, with keys and values of a block far apart or side by side."""
    shape, size = (2, BLOCKS, TOKENS, HEADS, DIM), TOKENS * HEADS * DIM
    apart: dict[str, LayerCache] = {"a": bf16(*shape)}
    beside: dict[str, LayerCache] = {
        "a": bf16(2 * BLOCKS * size).as_strided(shape, (size, 2 * size, HEADS * DIM, DIM, 1))
    }
    layout = layout_of(full("a", page=KV_PAGE))

    one = CacheViews(layout, apart, BLOCKS).canonical
    other = CacheViews(layout, beside, BLOCKS).canonical

    assert len(one.groups[0].pieces) != len(other.groups[0].pieces)
    assert one.page_encoding != other.page_encoding


@pytest.mark.parametrize("axis", [0, 1])
def test_a_declared_block_axis_settles_what_the_shape_leaves_open(axis: int) -> None:
    caches: dict[str, LayerCache] = {"a": bf16(2, 2, TOKENS, HEADS, DIM)}
    layout = layout_of(full("a", page=KV_PAGE))
    with pytest.raises(LayoutError, match="declared block_axis"):
        CacheViews(layout, caches, 2)

    views = CacheViews(layout, caches, 2, {"a": axis})
    views.scatter(GroupId(0), [1], torch.full((KV_PAGE,), 1, dtype=torch.uint8))

    (tensor,) = parts(caches["a"])
    assert tensor.select(axis, 1).view(torch.uint8).eq(1).all()
    assert not tensor.select(axis, 0).any()


def test_shared_tensor_under_a_second_name_is_accepted() -> None:
    caches = plain(BLOCKS, 2, TOKENS, HEADS, DIM)
    caches["borrows from a"] = caches["a"]

    canonical = CacheViews(two_layers(), caches, BLOCKS).canonical

    assert canonical.groups[0].row_bytes == 2 * KV_PAGE


def test_payload_of_another_size_is_refused() -> None:
    views = CacheViews(two_layers(), plain(BLOCKS, 2, TOKENS, HEADS, DIM), BLOCKS)

    for size, first_row in ((5, 0), (512, 1), (513, 0)):
        with pytest.raises(LayoutError, match=rf"payload of {size} bytes for rows .* of 512 bytes"):
            views.scatter(
                GroupId(0), [0], torch.zeros(size, dtype=torch.uint8), first_row=first_row
            )


def test_some_rows_of_a_payload_can_be_copied_back() -> None:
    source = CacheViews(two_layers(), plain(BLOCKS, 2, TOKENS, HEADS, DIM), BLOCKS)
    target = CacheViews(two_layers(), plain(BLOCKS, 2, TOKENS, HEADS, DIM), BLOCKS)
    payload = torch.randint(0, 256, (3 * 512,), dtype=torch.uint8)
    source.scatter(GroupId(0), [1, 2, 3], payload)

    target.scatter(GroupId(0), [0, 1], source.gather(GroupId(0), [1, 2, 3]), first_row=1)

    assert torch.equal(target.gather(GroupId(0), [0, 1]), source.gather(GroupId(0), [2, 3]))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (bf16(BLOCKS + 1, 2, TOKENS, HEADS, DIM), "6 kernel blocks on axis 0"),
        (bf16(TOKENS, BLOCKS, 2, HEADS, DIM), "6 kernel blocks on axis 0"),
        (bf16(BLOCKS, 2, TOKENS, HEADS, DIM + 1), "256 bytes per kernel block .*found 288"),
        (bf16(BLOCKS, 2, TOKENS, 1, DIM).expand(-1, -1, -1, HEADS, -1), "do not overlap"),
        (bf16(1, 2, TOKENS, HEADS, DIM).expand(BLOCKS, -1, -1, -1, -1), "256 bytes apart"),
        (bf16(2000).as_strided((BLOCKS, 2, TOKENS, HEADS, DIM), (128, 64, 16, 4, 1)), "overlap"),
    ],
)
def test_uncertain_layouts_are_refused_by_name(cache: torch.Tensor, expected: str) -> None:
    layout = layout_of(full("model.layers.3", page=KV_PAGE))

    with pytest.raises(LayoutError, match=expected) as caught:
        CacheViews(layout, {"model.layers.3": cache}, BLOCKS)
    assert "model.layers.3" in str(caught.value)
    assert str(tuple(cache.shape)) in str(caught.value)
    assert str(tuple(cache.stride())) in str(caught.value)
