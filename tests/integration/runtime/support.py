"""Engines with offloading whose insides can be looked at, and the tiers below them."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from kvstrata.config.parsing import parse_config
from kvstrata.core.ids import GroupId, chunk_key
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.cache.prefix_cache import needed_positions
from kvstrata.engine.offloading import offloading
from kvstrata.engine.scheduling.request import Request, RequestState
from kvstrata.transfers.native_queue import NativeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvstrata.core.chunk_grid import GroupChunks
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.layout import KVLayout
    from kvstrata.engine import Answer
    from kvstrata.runtime.scheduler_side import SchedulerSide
    from kvstrata.runtime.worker_side import RankMemory
    from kvstrata.telemetry.metrics import Metric
    from kvstrata.transfers.cache_views import CacheViews

CHUNK_TOKENS = 64
GREEDY = SamplingParams(max_tokens=6, keep_logits=True)
_DEFAULTS: dict[str, Any] = {
    "host": {"capacity": "16MiB"},
    "hybrid_chunk_size": CHUNK_TOKENS,
    "load": {"deadline": "10s", "decide": "always"},
}


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """A prompt; equal seeds share a prefix."""
    source = random.Random(seed)  # noqa: S311 - a prompt
    return [source.randrange(256) for _ in range(count)]


class Bed:
    """An engine with offloading, and its scheduler half within reach.

    Args:
        model: the model's folder.
        tier: the tier below host memory; None: host memory alone.
        options: those of the engine.
        settings: sections of the configuration to replace.
    """

    def __init__(
        self,
        model: Path,
        tier: Mapping[str, Any] | None = None,
        *,
        options: EngineOptions | None = None,
        **settings: Any,  # noqa: ANN401 - sections of any shape
    ) -> None:
        tiers = [] if tier is None else [dict(tier)]
        config = parse_config({**_DEFAULTS, "tiers": tiers, **settings})
        self.model = model
        options = options or EngineOptions(num_blocks=400)
        self.engine = Engine(model, options, offloading(config, model))
        self.side = cast("SchedulerSide", self.engine._connector)  # noqa: SLF001 - looked into on purpose

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()

    @property
    def layout(self) -> KVLayout:
        return self.engine.layout

    @property
    def memory(self) -> RankMemory:
        """What the only rank has."""
        return cast("RankMemory", cast("Any", self.engine)._ranks._rank._connector._memory)  # noqa: SLF001

    @property
    def views(self) -> CacheViews:
        copies: Any = self.memory.copies
        owner = copies if isinstance(copies, NativeQueue) else copies._copier  # noqa: SLF001
        return cast("CacheViews", owner._views)  # noqa: SLF001

    def ask(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Answer:
        """One answer; afterwards nothing is under way."""
        [answer] = self.engine.generate([prompt], sampling)
        self.settle()
        return answer

    def settle(self, seconds: float = 30) -> None:
        """Step until nothing is under way, then check that nothing is left behind."""
        self.step_until(lambda: not self.engine.scheduler.has_work, seconds)
        self.check_quiet()

    def step_until(self, is_true: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "waited in vain"
            self.engine.step()

    def check_quiet(self) -> None:
        pool = self.engine.scheduler.blocks.pool
        self.engine.scheduler.check_invariants()
        self.side.check_invariants()
        assert pool.num_free == pool.num_blocks - 1, "blocks are still held"
        assert self.side.num_leases == 0, "chunks are still leased"
        assert not self.side.hook_faults, self.side.hook_faults

    def drop_device(self) -> None:
        """The device's prefixes are gone."""
        self.settle()
        self.engine.scheduler.blocks.pool.forget_all()

    def drop_host(self) -> None:
        """Those of host memory are gone as well; the tiers below keep theirs."""
        self.drop_device()
        assert self.side.reset()

    @property
    def groups(self) -> Sequence[GroupChunks]:
        """How each group is cut into chunks."""
        return self.side._geometry.groups  # noqa: SLF001

    @property
    def num_held_blocks(self) -> int:
        """Blocks that stores hold on the device."""
        return self.side._stores.num_held_blocks  # noqa: SLF001

    @property
    def copy_speed(self) -> float | None:
        """Measured on loads, in bytes per second."""
        return self.side._speeds._copy.per_s  # noqa: SLF001

    def failed_keys(self, request: Request) -> set[ChunkKey]:
        """What is not offered to a request again."""
        return self.side._requests[request.request_id].failed  # noqa: SLF001

    def count(self, metric: Metric, *labels: object) -> float:
        """A metric's sum over the labels that are not given."""
        wanted = tuple(map(str, labels))
        return sum(
            sample.value
            for sample in self.side.stats()
            if sample.name == metric.name and sample.labels[: len(wanted)] == wanted
        )

    def by_label(self, metric: Metric) -> Counter[str]:
        """A metric's values that are not zero, by its first label."""
        values: Counter[str] = Counter()
        for sample in self.side.stats():
            if sample.name == metric.name and sample.value:
                values[sample.labels[0]] += int(sample.value)
        return values

    def engine_key(self, prompt: Sequence[int], position: int, group_id: int = 0) -> ChunkKey:
        """The key of a block of a prompt; where chunks are blocks, that of the chunk."""
        end = (position + 1) * self.layout.groups[group_id].block_tokens
        hashes = _hashes(self.engine, prompt)
        return chunk_key(hashes[end // self.layout.hash_block_tokens - 1], GroupId(group_id))

    def known_bytes(self, prompt: Sequence[int], hit: int) -> dict[tuple[int, int], bytes]:
        """The bytes of every block that a hit needs, found by its prefix as the engine does."""
        found = {}
        for group_id, position in _needed(self.layout, hit):
            key = self.engine_key(prompt, position, group_id)
            block = self.engine.scheduler.blocks.pool.find(key)
            assert block is not None, f"group {group_id} has no block {position}"
            found[group_id, position] = self.block_bytes(group_id, block)
        return found

    def held_bytes(self, request: Request, hit: int) -> dict[tuple[int, int], bytes]:
        """The bytes of every block that a hit needs, in the blocks that a request has."""
        return {
            (group_id, position): self.block_bytes(
                group_id, request.tables[group_id].blocks[position]
            )
            for group_id, position in _needed(self.layout, hit)
        }

    def block_bytes(self, group_id: int, block: int) -> bytes:
        size = self.layout.groups[group_id].rows_per_block
        rows = range(block * size, (block + 1) * size)
        return self.views.gather(GroupId(group_id), rows).numpy().tobytes()


@dataclass(frozen=True)
class Expected:
    """What an engine without offloading says about a prompt."""

    tokens: list[int]
    hit_tokens: int
    """Of the same prompt, on the device."""
    logits: list[list[float]]
    """Behind that hit."""


def expected_of(
    model: Path, prompt: Sequence[int], options: EngineOptions | None = None
) -> Expected:
    with Engine(model, options or EngineOptions(num_blocks=400)) as engine:
        [cold] = engine.generate([prompt], GREEDY)
        [warm] = engine.generate([prompt], GREEDY)
    assert cold.tokens == warm.tokens
    return Expected(cold.tokens, warm.local_hit_tokens, warm.logits)


def plan_bytes(bed: Bed, hit: int) -> Counter[str]:
    """Bytes of the chunks that a hit behind nothing needs, by group: whole chunks."""
    sizes: Counter[str] = Counter()
    for chunks in bed.groups:
        group = chunks.group
        first = 0
        if group.window_tokens is not None:
            first = max(0, hit - group.window_tokens + 1)
        elif group.kind == "recurrent":
            first = hit - 1
        num_chunks = -(-hit // chunks.chunk_tokens) - first // chunks.chunk_tokens
        sizes[str(chunks.group_id)] = num_chunks * chunks.chunk_bytes
    return sizes


def is_loaded(request: Request) -> bool:
    """Whether its blocks are filled, and nothing more was computed."""
    return request.state is RequestState.RUNNING


def _needed(layout: KVLayout, hit: int) -> Iterator[tuple[int, int]]:
    for group_id, group in enumerate(layout.groups):
        for position in needed_positions(group, hit):
            yield group_id, position


def _hashes(engine: Engine, prompt: Sequence[int]) -> Sequence[Any]:
    return Request("hashes", prompt, SamplingParams(), engine.layout).hashes
