"""Every way engines lay out KV caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.transfers.cache_views import LayerCache

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


def parts(cache: LayerCache) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else cache


def fill(cache: LayerCache, seed: int) -> None:
    """Random values, written through the tensor's own shape."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in parts(cache):
        values = torch.randint(-100, 100, tensor.shape, generator=generator)
        tensor.copy_(values.to(tensor.dtype))


def all_bytes(caches: dict[str, LayerCache]) -> bytes:
    tensors = [t for cache in caches.values() for t in parts(cache)]
    unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return b"".join(bytes(storage.tolist()) for storage in unique.values())
