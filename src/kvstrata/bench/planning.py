"""What planning costs the scheduler thread, and how it grows with the prompt."""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from kvstrata.bench.report import Goal, Report, Series, fastest_s
from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.core.lookups import ChunkLookup, LookupCodes
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.load_plan import LoadBounds, choose_load
from kvstrata.planning.request_ledger import RequestLedger, StateOffer
from kvstrata.planning.store_plan import choose_stores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey

PROMPT_TOKENS: Final = 131_072
SIZES: Final = (8_192, 32_768, PROMPT_TOKENS, 524_288)
_DECODE_STEPS: Final = 4_096
_REPEATS: Final = 15
_LINEAR: Final = 1.1
"""Largest growth exponent that counts as linear: the tenth is for caches and noise."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each kind of work for one prompt."""

    unchanged_s: float
    cold_s: float
    hashing_s: float
    decode_step_s: float


class DictIndex:
    """The plainest index there can be: one dictionary."""

    def __init__(self) -> None:
        self._known: dict[ChunkKey, int] = {}

    def add(self, keys: Sequence[ChunkKey]) -> None:
        """Make chunks READY."""
        self._known.update(dict.fromkeys(keys, int(ChunkLookup.READY)))

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """What is known about each key."""
        get = self._known.get
        return LookupCodes(bytes([get(key, 0) for key in keys]))


def hybrid_layout() -> KVLayout:
    """Eight groups of three kinds: two full, three window, three recurrent."""

    def group(kind: GroupKind, index: int, block_tokens: int, window: int | None = None) -> KVGroup:
        page_bytes = 4096 * block_tokens if kind is not GroupKind.RECURRENT else 2**20
        layers = tuple(KVLayer(f"{kind}.{index}.{n}", page_bytes) for n in range(5))
        return KVGroup(kind=kind, block_tokens=block_tokens, layers=layers, window_tokens=window)

    full = (group(GroupKind.FULL, i, 16) for i in range(2))
    window = (group(GroupKind.WINDOW, i, 16, window=1024) for i in range(3))
    recurrent = (group(GroupKind.RECURRENT, i, 528) for i in range(3))
    return KVLayout(groups=(*full, *window, *recurrent), hash_block_tokens=16, dtype="bfloat16")


def run() -> Report:
    """Measure planning at several prompt lengths."""
    geometry = cut_into_chunks(hybrid_layout())
    costs = {size: measure(geometry, size) for size in SIZES}
    at = costs[PROMPT_TOKENS]
    growth = max(_growth(costs[SIZES[0]], costs[SIZES[-1]], field.name) for field in fields(Costs))
    return Report(
        name="planning",
        setting=(
            f"{PROMPT_TOKENS:,}-token prompt, 8 groups (2 full, 3 window, 3 recurrent), hash block "
            f"16, every chunk present; fastest of {_REPEATS} runs"
        ),
        goals=(
            Goal("look up and choose, nothing changed", at.unchanged_s * 1e3, 1.0, "ms"),
            Goal("look up and choose, cold, hashes given", at.cold_s * 1e3, 10.0, "ms"),
            Goal("bookkeeping of a decode step", at.decode_step_s * 1e6, 20.0, "us/request"),
            Goal("growth from 8K to 512K tokens", growth, _LINEAR, "exponent (1 is linear)"),
        ),
        series=(
            Series(
                "Growth with the prompt",
                "tokens",
                ("unchanged (ms)", "cold (ms)", "hash prompt (ms)", "decode step (us)"),
                tuple((size, _row(cost)) for size, cost in costs.items()),
            ),
        ),
    )


def measure(geometry: ChunkGeometry, num_tokens: int) -> Costs:
    """The costs of one prompt length."""
    unit = geometry.layout.hash_block_tokens
    tokens = list(range(num_tokens))

    def hash_prompt() -> PrefixHasher:
        hasher = PrefixHasher(unit)
        hasher.extend(tokens)
        return hasher

    hashes = hash_prompt().hashes
    grid, index = ChunkGrid(geometry, hashes), DictIndex()
    for chunks in geometry.groups:
        index.add(grid.keys(chunks.group_id))
    bounds = LoadBounds(num_tokens)

    def look_up_and_choose(grid: ChunkGrid) -> None:
        plan = choose_load(geometry, grid.lookup(index.lookup), bounds)
        assert plan.external_tokens

    gc.collect()
    return Costs(
        unchanged_s=fastest_s(lambda: look_up_and_choose(grid), repeats=_REPEATS),
        cold_s=fastest_s(lambda: look_up_and_choose(ChunkGrid(geometry, hashes)), repeats=_REPEATS),
        hashing_s=fastest_s(hash_prompt, repeats=_REPEATS),
        decode_step_s=_decode_step_s(geometry, hash_prompt(), num_tokens),
    )


def _decode_step_s(geometry: ChunkGeometry, hasher: PrefixHasher, num_tokens: int) -> float:
    """Mean seconds of a step: hash the token, advance, choose, begin and settle stores.

    A state of each recurrent group is offered at each boundary.
    """
    ledger = RequestLedger(ChunkGrid(geometry, hasher.hashes))
    boundary = geometry.layout.hit_stride_tokens
    ledger.advance(num_tokens)
    ledger.begin(choose_stores(ledger).chunks)
    positions = itertools.count(num_tokens + 1)

    def steps() -> None:
        for position in itertools.islice(positions, _DECODE_STEPS):
            hasher.extend((position,))
            ledger.advance(position)
            if position % boundary == 0:
                for chunks in geometry.recurrent:
                    ledger.offer_state(StateOffer(chunks.group_id, position))
            if ledger.has_news:
                plan = choose_stores(ledger)
                ledger.begin(plan.chunks)
                ledger.settle(plan.chunks)

    return fastest_s(steps, repeats=3) / _DECODE_STEPS


def _growth(small: Costs, large: Costs, name: str) -> float:
    """The exponent e in time ~ tokens ** e."""
    slower = getattr(large, name) / getattr(small, name)
    return math.log(slower) / math.log(SIZES[-1] / SIZES[0])


def _row(cost: Costs) -> tuple[float, ...]:
    return (
        cost.unchanged_s * 1e3,
        cost.cold_s * 1e3,
        cost.hashing_s * 1e3,
        cost.decode_step_s * 1e6,
    )
