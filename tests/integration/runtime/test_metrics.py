"""What is counted adds up, whatever happened."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstrata.engine import EngineOptions, SamplingParams
from kvstrata.telemetry import metrics
from kvstrata.telemetry.metrics import METRICS
from kvstrata.transfers.plain_copier import PlainCopier

from .support import Bed, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.engine.scheduling.request import Request
    from kvstrata.transfers.copy_queue import ChunkCopier, ChunkCopy

    from .conftest import Models, Tiers

SMALL_HOST = {"capacity": "512KiB"}
NUM_BLOCKS = {"llama": 60, "gemma3": 160, "qwen3_next": 80}
TOO_FEW = {"llama": 26, "qwen3_next": 46}
COUNTED = {metric.name for metric in METRICS if metric.kind == "counter"}


class Workload:
    """Requests that share prefixes, side by side, some of them aborted."""

    def __init__(
        self, bed: Bed, seed: int, *, abort_share: float = 0.0, most_tokens: int = 12
    ) -> None:
        self.bed = bed
        self.random = random.Random(seed)  # noqa: S311 - a workload
        self.abort_share = abort_share
        self.most_tokens = most_tokens
        self.prompt_tokens = 0
        self.num_requests = 0
        self.num_preemptions = 0
        self._before: dict[tuple[str, ...], float] = {}

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            requests = [self._request() for _ in range(self.random.randint(1, 5))]
            while any(request.finish_reason is None for request in requests):
                self.bed.engine.step()
                self._check_growth()
                if self.random.random() < self.abort_share:
                    self.bed.engine.abort(self.random.choice(requests).request_id)
            self.num_preemptions += sum(request.num_preemptions for request in requests)
            self.bed.settle()
            self._check_sums()
            if self.random.random() < 0.4:
                self.bed.engine.scheduler.blocks.pool.forget_all()

    def _request(self) -> Request:
        prompt = tokens_of(self.random.randint(1, 260), seed=self.random.randrange(6))
        self.num_requests += 1
        self.prompt_tokens += len(prompt)
        return self.bed.engine.add_request(
            prompt, SamplingParams(max_tokens=self.random.randint(1, self.most_tokens))
        )

    def _check_growth(self) -> None:
        """Counters never go down, nothing is negative."""
        now = {(sample.name, *sample.labels): sample.value for sample in self.bed.side.stats()}
        assert all(value >= 0 for value in now.values())
        for key, value in self._before.items():
            assert key[0] not in COUNTED or now[key] >= value, key
        self._before = now

    def _check_sums(self) -> None:
        count, by_label = self.bed.count, self.bed.by_label
        prompts, hits = by_label(metrics.PROMPT_TOKENS), by_label(metrics.HIT_TOKENS)
        assert prompts.total() == count(metrics.LOOKUP_TOKENS)
        assert prompts["computed"] == count(metrics.MISS_TOKENS)
        assert hits == +Counter(
            {k: v for k, v in prompts.items() if k not in ("computed", "local")}
        )


@pytest.mark.usefixtures("plain_copies")
@pytest.mark.parametrize(
    "arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_next"]
)
@pytest.mark.parametrize("mode", ["eager", pytest.param("lazy", marks=pytest.mark.slow)])
def test_tokens_by_source_add_up(
    arch: str, mode: str, model: Models, tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: Counter[tuple[str, str]] = Counter()
    for direction in ("load", "store"):
        really = getattr(PlainCopier, direction)

        def counted(
            self: ChunkCopier, copy: ChunkCopy, really: object = really, direction: str = direction
        ) -> None:
            copied[direction, str(copy.group_id)] += 1
            really(self, copy)  # type: ignore[operator]

        monkeypatch.setattr(PlainCopier, direction, counted)
    options = EngineOptions(num_blocks=1000 if mode == "eager" else NUM_BLOCKS[arch])
    settings = {"host": SMALL_HOST, "store": {"mode": mode}}
    with Bed(model(arch), tier("filesystem"), options=options, **settings) as bed:
        work = Workload(bed, seed=1)
        work.run(12)

        assert bed.count(metrics.HIT_TOKENS) > 0
        assert bed.count(metrics.LOOKUP_TOKENS) == work.prompt_tokens
        for chunks in bed.groups:
            name, size = str(chunks.group_id), chunks.chunk_bytes
            assert bed.count(metrics.LOAD_BYTES, name) == size * copied["load", name]
            assert bed.count(metrics.STORE_BYTES, name) == size * copied["store", name]


@pytest.mark.usefixtures("plain_copies")
@pytest.mark.parametrize("arch", ["llama", "qwen3_next"])
def test_they_do_when_loads_fail_and_requests_are_aborted_and_preempted(
    arch: str, model: Models, tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(5)  # noqa: S311 - faults
    really: Callable[[ChunkCopier, ChunkCopy], None] = getattr(PlainCopier, "load")  # noqa: B009

    def unreliable(self: ChunkCopier, copy: ChunkCopy) -> None:
        if source.random() < 0.1:
            raise RuntimeError("the device is lost")
        really(self, copy)

    monkeypatch.setattr(PlainCopier, "load", unreliable)
    options = EngineOptions(num_blocks=TOO_FEW[arch], max_step_tokens=64)
    with Bed(model(arch), tier("filesystem"), options=options, host=SMALL_HOST) as bed:
        work = Workload(bed, seed=2, abort_share=0.01, most_tokens=80)
        work.run(8)

        assert work.num_preemptions > 0
        assert bed.count(metrics.LOADS_FAILED) > 0
        assert bed.count(metrics.HIT_TOKENS) > 0


@pytest.mark.parametrize("arch", ["llama", "qwen3_next"])
def test_a_preempted_request_is_counted_once(arch: str, model: Models, tier: Tiers) -> None:
    options = EngineOptions(num_blocks=TOO_FEW[arch], max_step_tokens=64)
    with Bed(model(arch), tier("filesystem"), options=options, host=SMALL_HOST) as bed:
        work = Workload(bed, seed=2, most_tokens=80)
        work.run(5)

        assert work.num_preemptions > 0
        assert bed.count(metrics.HIT_TOKENS) > 0
        assert bed.count(metrics.LOOKUPS) == work.num_requests
        assert bed.by_label(metrics.PROMPT_TOKENS).total() == work.prompt_tokens
