"""Hundreds of requests against caches so small that everything is evicted all the time.

Requests share prefixes; they are aborted, preempted and reset at random; the tier below fails,
hangs and damages what it holds. Every answer must equal that of an engine without offloading, and
nothing may be left behind. `KVSTRATA_SOAK=full` runs for ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstrata.config.parsing import parse_config
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.offloading import offloading
from kvstrata.engine.tiny import make_tiny
from kvstrata.runtime.scheduler_side import SchedulerSide
from kvstrata.telemetry import metrics
from kvstrata.telemetry.event_consumer import EventConsumer, NumberedBatch
from kvstrata.telemetry.kv_events import KVEventBatch, encode_batch

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.engine.scheduling.request import Request

IS_FULL = os.environ.get("KVSTRATA_SOAK") == "full"
SECONDS = 600 / 6 if IS_FULL else 60
MOST_ROUNDS = 1_000_000 if IS_FULL else 10
NUM_BLOCKS = {"lfm2": 120, "gemma3": 220, "qwen3_next": 80}
MAX_ANSWER = 24
LOAD_DEADLINE_S = 1.0
_FIGURES: list[str] = []


@dataclass
class Figures:
    """What one run has seen."""

    requests: int = 0
    aborts: int = 0
    resets: int = 0
    quiet_points: int = 0
    longest_wait_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


class Soak:
    """One engine under attack, and the answers it must give."""

    def __init__(self, arch: str, mode: str, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.figures = Figures()
        self.model = folder / "model"
        make_tiny(arch, self.model)
        self.options = EngineOptions(
            num_blocks=NUM_BLOCKS[arch], max_step_tokens=64, max_running=6
        )
        config = parse_config(
            {
                "host": {"capacity": "256KiB"},
                "hybrid_chunk_size": 32,
                "tiers": [
                    {
                        "kind": "custom",
                        "name": "faulty",
                        "store": "kvstrata.testing.faulty_store:FaultyStore",
                        "options": {"path": str(folder / "store"), "fault_share": 0.05, "seed": seed},
                    }
                ],
                "store": {"mode": mode},
                "load": {"deadline": f"{LOAD_DEADLINE_S}s", "decide": "always"},
                "events": {"self_describing": True},
            }
        )
        self.reference = Engine(self.model, EngineOptions(num_blocks=4000))
        self.engine = Engine(self.model, self.options, offloading(config, self.model))
        side = self.engine._connector  # noqa: SLF001 - what is inside is what is tested
        assert isinstance(side, SchedulerSide)
        self.side = side
        self.consumer = EventConsumer()
        self.num_batches = 0
        self.prefixes = [self._tokens(self.random.randrange(20, 300)) for _ in range(8)]
        self.expected: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def run(self, seconds: float, most_rounds: int) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.figures.quiet_points < most_rounds:
            self._round()
            self._settle()
        self.reference.close()
        self.engine.close()

    def _round(self) -> None:
        """A burst of requests, some of them aborted on the way."""
        waiting = [self._request() for _ in range(self.random.randrange(1, 12))]
        living: dict[str, Request] = {}
        arrived: dict[str, float] = {}
        while waiting or living:
            if waiting and self.random.random() < 0.5:
                request = self.engine.add_request(*waiting.pop())
                living[request.request_id] = request
                arrived[request.request_id] = time.monotonic()
                self.figures.requests += 1
            self._step()
            self._attack(living)
            for name, request in list(living.items()):
                if request.finish_reason:
                    del living[name]
                    self._check(request)

    def _attack(self, living: dict[str, Request]) -> None:
        if living and self.random.random() < 0.02:
            name = self.random.choice(list(living))
            self.engine.abort(name)
            del living[name]
            self.figures.aborts += 1
        if self.random.random() < 0.005:
            assert self.engine.reset_cache()
            self.figures.resets += 1

    def _step(self) -> None:
        self.engine.step()
        events = self.side.take_events()
        if events:
            batch = KVEventBatch(ts=0.0, events=list(events))  # type: ignore[arg-type]
            self.consumer.receive(NumberedBatch(self.num_batches, encode_batch(batch)))
            self.num_batches += 1

    def _settle(self) -> None:
        """Let everything come to rest: nothing may be left, and the index must be exact."""
        end = time.monotonic() + 30
        self._step()
        while self.engine.scheduler.has_work:
            assert time.monotonic() < end, "something never ends"
            self._step()
        pool = self.engine.scheduler.blocks.pool
        self.engine.scheduler.check_invariants()
        self.side.check_invariants()
        assert pool.num_free == pool.num_blocks - 1, "blocks are leaked"
        assert self.side.num_leases == 0, "chunks are still leased"
        assert not self.side.hook_faults, self.side.hook_faults
        self._check_index()
        self.figures.quiet_points += 1

    def _check_index(self) -> None:
        assert self.consumer.is_exact or not self.num_batches
        resident = {(key[-2:], key[:-2]) for key in self.side.host_keys()}
        announced = self.side.tracker.residencies("host")
        assert {(k[-2:], k[:-2]) for k in announced} == resident
        counted = Counter(
            address.group_idx for address in self.consumer.index if address.ownership == "host"
        )
        groups = {int.from_bytes(group, "big") for group, _ in resident}
        assert set(counted) == groups

    def _check(self, request: Request) -> None:
        """The answer is that of an engine without offloading."""
        prompt = tuple(request.tokens[: request.num_prompt_tokens])
        key = (prompt, request.sampling.max_tokens)
        if key not in self.expected:
            [answer] = self.reference.generate([list(prompt)], request.sampling)
            self.expected[key] = answer.tokens
        assert request.output == self.expected[key], f"wrong answer after {request.request_id}"

    def _request(self) -> tuple[list[int], SamplingParams]:
        prompt = self.random.choice(self.prefixes)[: self.random.randrange(10, 300)]
        if self.random.random() < 0.7:
            prompt = prompt + self._tokens(self.random.randrange(1, 40))
        return prompt, SamplingParams(max_tokens=self.random.randrange(1, MAX_ANSWER))

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("arch", ["lfm2", "gemma3", "qwen3_next"])
def test_every_answer_is_right_and_nothing_is_left(
    arch: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    soak = Soak(arch, mode, tmp_path, seed=1)

    soak.run(SECONDS, MOST_ROUNDS)

    stats = {(s.name, *s.labels): s.value for s in soak.side.stats()}
    loaded = sum(v for k, v in stats.items() if k[0] == metrics.HIT_TOKENS.name)
    evicted = stats.get((metrics.EVICTIONS.name, "host"), 0)
    with capsys.disabled():
        print(f"\n{arch} {mode}: {soak.figures.requests} requests, {soak.figures.aborts} aborted, {soak.figures.resets} resets, {loaded:,.0f} tokens loaded, {evicted:,.0f} evictions, {soak.figures.quiet_points} quiet points")  # noqa: T201
    assert loaded > 0
    assert evicted > 0
