"""Every way engines lay out KV caches: filled through their own shapes, copied through ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.core.spans import RowSpan
from kvstrata.errors import LayoutError
from kvstrata.transfers.cache_views import CacheViews, LayerCache
from kvstrata.transfers.copy_plans import device_rows

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS, TOKENS, HEADS, DIM = 6, 4, 2, 8
BF16 = 2


@dataclass
class Case:
    """Caches of one model, and for each layer how one block looks through its own shape."""

    layout: KVLayout
    make: Callable[[], dict[str, LayerCache]]
    kernel_rows: int = 1
    by_block: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = field(default_factory=dict)


def full(*layers: str, page: int, block: int = TOKENS, kernel: int | None = None) -> KVGroup:
    return KVGroup(
        kind=GroupKind.FULL,
        block_tokens=block,
        kernel_block_tokens=kernel,
        layers=tuple(KVLayer(name, page) for name in layers),
    )


def window(*layers: str, page: int, block: int = TOKENS) -> KVGroup:
    return KVGroup(
        kind=GroupKind.WINDOW,
        block_tokens=block,
        window_tokens=8,
        layers=tuple(KVLayer(name, page) for name in layers),
    )


def recurrent(*layers: str, page: int, block: int = TOKENS) -> KVGroup:
    return KVGroup(
        kind=GroupKind.RECURRENT,
        block_tokens=block,
        layers=tuple(KVLayer(name, page) for name in layers),
    )


def layout_of(*groups: KVGroup) -> KVLayout:
    return KVLayout(groups=groups, hash_block_tokens=TOKENS, dtype="bfloat16")


KV_PAGE = 2 * TOKENS * HEADS * DIM * BF16


def plain(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, LayerCache]:
    return {name: torch.zeros(shape, dtype=dtype) for name in ("a", "b")}


def two_layers(page: int = KV_PAGE) -> KVLayout:
    return layout_of(full("a", "b", page=page))


def layers_in_blocks() -> dict[str, LayerCache]:
    storage = torch.zeros(BLOCKS, 2, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    return {"a": storage[:, 0], "b": storage[:, 1]}


def layers_inside_key_value_halves() -> dict[str, LayerCache]:
    storage = torch.zeros(2, BLOCKS, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    return {"a": storage[:, :, 0], "b": storage[:, :, 1]}


def padded_pages() -> dict[str, LayerCache]:
    storage = torch.zeros(BLOCKS, KV_PAGE // BF16 + 40, dtype=torch.bfloat16)
    dense = storage[:, : KV_PAGE // BF16]
    other = storage.clone()[:, : KV_PAGE // BF16]
    shape = (BLOCKS, 2, TOKENS, HEADS, DIM)
    strides = (storage.stride(0), TOKENS * HEADS * DIM, HEADS * DIM, DIM, 1)
    return {"a": dense.as_strided(shape, strides), "b": other.as_strided(shape, strides)}


def state_parts() -> dict[str, LayerCache]:
    return {
        name: [
            torch.zeros(BLOCKS, 3, 16, dtype=torch.bfloat16),
            torch.zeros(BLOCKS, 2, 8, 8, dtype=torch.float32),
        ]
        for name in ("a", "b")
    }


def state_parts_in_one_page() -> dict[str, LayerCache]:
    """Conv and ssm parts of a state behind each other in one padded page."""
    conv, ssm, page = 3 * 16 * 2, 2 * 8 * 8 * 4, 1024
    caches: dict[str, LayerCache] = {}
    for name in ("a", "b"):
        raw = torch.zeros(BLOCKS * page, dtype=torch.uint8)
        caches[name] = [
            raw.view(torch.bfloat16).as_strided((BLOCKS, 3, 16), (page // 2, 16, 1)),
            raw.view(torch.float32).as_strided((BLOCKS, 2, 8, 8), (page // 4, 64, 8, 1), conv // 4),
        ]
    assert conv + ssm < page
    return caches


def overlaid_groups() -> dict[str, LayerCache]:
    """Three groups over one storage, as hybrid engines do: any block serves any group."""
    page = 2 * KV_PAGE
    raw = torch.zeros(2, BLOCKS, page, dtype=torch.int8)
    attention = raw.view(torch.bfloat16).view(2, BLOCKS, 2, 2 * TOKENS, HEADS, DIM)
    state = raw.as_strided((2, BLOCKS, 1, 1, 300), (BLOCKS * page, page, 300, 300, 1))
    return {
        "full.0": attention[0],
        "full.1": attention[1],
        "window.0": attention[0],
        "window.1": attention[1],
        "state.0": state[0],
        "state.1": state[1],
    }


OVERLAID = layout_of(
    full("full.0", "full.1", page=2 * KV_PAGE, block=2 * TOKENS),
    window("window.0", "window.1", page=2 * KV_PAGE, block=2 * TOKENS),
    recurrent("state.0", "state.1", page=300, block=2 * TOKENS),
)

CASES = {
    "keys and values split in the first axis": Case(
        two_layers(),
        lambda: plain(2, BLOCKS, TOKENS, HEADS, DIM),
        by_block=dict.fromkeys("ab", lambda t, b: t[:, b]),
    ),
    "keys and values split in the second axis": Case(
        two_layers(), lambda: plain(BLOCKS, 2, TOKENS, HEADS, DIM)
    ),
    "joined in the last axis, tokens before heads": Case(
        two_layers(), lambda: plain(BLOCKS, TOKENS, HEADS, 2 * DIM)
    ),
    "joined in the last axis, heads before tokens": Case(
        two_layers(), lambda: plain(BLOCKS, HEADS, TOKENS, 2 * DIM)
    ),
    "heads before tokens in shape, tokens before heads in memory": Case(
        two_layers(),
        lambda: {
            name: torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
            for name in ("a", "b")
        },
    ),
    "one latent (MLA)": Case(two_layers(TOKENS * 72 * BF16), lambda: plain(BLOCKS, TOKENS, 72)),
    "fp8": Case(
        two_layers(KV_PAGE // 2),
        lambda: plain(BLOCKS, 2, TOKENS, HEADS, DIM, dtype=torch.float8_e4m3fn),
    ),
    "int8": Case(
        two_layers(KV_PAGE // 2),
        lambda: plain(2, BLOCKS, TOKENS, HEADS, DIM, dtype=torch.int8),
        by_block=dict.fromkeys("ab", lambda t, b: t[:, b]),
    ),
    "packed state": Case(
        layout_of(recurrent("a", "b", page=300)),
        lambda: plain(BLOCKS, 1, 1, 300, dtype=torch.int8),
    ),
    "state in parts of different dtypes": Case(
        layout_of(recurrent("a", "b", page=3 * 16 * 2 + 2 * 8 * 8 * 4)), state_parts
    ),
    "state in parts inside one padded page": Case(
        layout_of(recurrent("a", "b", page=3 * 16 * 2 + 2 * 8 * 8 * 4)), state_parts_in_one_page
    ),
    "pages padded to a common size": Case(two_layers(), padded_pages),
    "blocks of several kernel blocks": Case(
        layout_of(full("a", "b", page=3 * KV_PAGE, block=3 * TOKENS, kernel=TOKENS)),
        lambda: plain(BLOCKS * 3, 2, TOKENS, HEADS, DIM),
        kernel_rows=3,
    ),
    "kernel blocks behind an axis of keys and values": Case(
        layout_of(full("a", "b", page=3 * KV_PAGE, block=3 * TOKENS, kernel=TOKENS)),
        lambda: plain(2, BLOCKS * 3, TOKENS, HEADS, DIM),
        kernel_rows=3,
        by_block=dict.fromkeys("ab", lambda t, b: t[:, 3 * b : 3 * b + 3]),
    ),
    "one storage, layers inside the block stride": Case(two_layers(), layers_in_blocks),
    "one storage, layers inside the halves of keys and values": Case(
        two_layers(),
        layers_inside_key_value_halves,
        by_block=dict.fromkeys("ab", lambda t, b: t[:, b]),
    ),
    "groups overlaying one storage": Case(OVERLAID, overlaid_groups),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def parts(cache: LayerCache) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else cache


def fill(cache: LayerCache, seed: int) -> None:
    """Random values, written through the tensor's own shape."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in parts(cache):
        values = torch.randint(-100, 100, tensor.shape, generator=generator)
        tensor.copy_(values.to(tensor.dtype))


def block_of(case: Case, name: str, cache: LayerCache, block: int) -> list[torch.Tensor]:
    """One block of one layer, read through the tensor's own shape."""
    rows = slice(block * case.kernel_rows, (block + 1) * case.kernel_rows)
    view = case.by_block.get(name)
    blocks = [view(t, block) if view else t[rows] for t in parts(cache)]
    return [tensor.float() for tensor in blocks]


def all_bytes(caches: dict[str, LayerCache]) -> bytes:
    tensors = [t for cache in caches.values() for t in parts(cache)]
    unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return b"".join(bytes(storage.tolist()) for storage in unique.values())


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
