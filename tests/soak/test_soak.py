"""Hundreds of requests against caches so small that everything is evicted all the time.

Requests share prefixes; they are aborted, preempted and reset at random; the tier below fails,
hangs and damages what it holds. Every answer must equal that of an engine without offloading, and
nothing may be left behind. `KVSTRATA_SOAK=full` runs for ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from kvstrata.config.parsing import parse_config
from kvstrata.config.units import ByteSize
from kvstrata.core.ids import ChunkKey, key_group, key_hash
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.offloading import offloading
from kvstrata.engine.tiny import make_tiny
from kvstrata.runtime.scheduler_side import SchedulerSide
from kvstrata.telemetry import metrics
from kvstrata.telemetry.event_consumer import EventConsumer, NumberedBatch
from kvstrata.telemetry.kv_events import KVEventBatch, encode_batch

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.engine import Answer
    from kvstrata.engine.scheduling.request import Request

IS_FULL = os.environ.get("KVSTRATA_SOAK") == "full"
SECONDS = 600 / 6 if IS_FULL else 60
MOST_ROUNDS = 1_000_000 if IS_FULL else 16
NUM_BLOCKS = {"lfm2": 120, "gemma3": 220, "qwen3_next": 80}
HOST = {"lfm2": "512KiB", "gemma3": "1MiB", "qwen3_next": "512KiB"}
QUOTA = {"lfm2": "1500KiB", "gemma3": "3MiB", "qwen3_next": "1500KiB"}
MAX_ANSWER = 24
LOAD_DEADLINE_S = 1.0
TOLERANCE = 1e-4
"""Between the scores of equal tokens: batches of other sizes round otherwise."""


@dataclass
class Figures:
    """What one run has seen."""

    requests: int = 0
    aborts: int = 0
    resets: int = 0
    quiet_points: int = 0
    longest_wait_s: float = 0.0
    longest_gap_s: float = 0.0
    """Between the starts of two steps."""
    largest_difference: float = 0.0
    """Between a score and the reference's."""
    ties: int = 0
    """Answers that went on with another token, as likely as the reference's."""


class Soak:
    """One engine under attack, and the answers it must give."""

    def __init__(self, arch: str, mode: str, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - not a secret
        self.figures = Figures()
        self.model = folder / "model"
        self.store = folder / "store"
        make_tiny(arch, self.model)
        self.options = EngineOptions(num_blocks=NUM_BLOCKS[arch], max_step_tokens=64, max_running=6)
        config = parse_config(
            {
                "host": {"capacity": HOST[arch]},
                "hybrid_chunk_size": 32,
                "tiers": [
                    {
                        "kind": "custom",
                        "name": "faulty",
                        "store": "kvstrata.testing.faulty_store:FaultyStore",
                        "options": {
                            "path": str(self.store),
                            "quota": ByteSize.parse(QUOTA[arch]),
                            "fault_share": 0.05,
                            "seed": seed,
                        },
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
        self.stepped_at = time.monotonic()
        self.prefixes = [self._tokens(self.random.randrange(20, 300)) for _ in range(8)]
        self.expected: dict[tuple[tuple[int, ...], int], Answer] = {}

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
        while waiting or living:
            if waiting and self.random.random() < 0.5:
                request = self.engine.add_request(*waiting.pop())
                living[request.request_id] = request
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
        now = time.monotonic()
        self.figures.longest_gap_s = max(self.figures.longest_gap_s, now - self.stepped_at)
        self.stepped_at = now
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
        """The consumer knows exactly what rests in host memory and on disk."""
        assert self.consumer.is_exact or not self.num_batches
        on_disk = self._settled_disk_keys()
        for tier, true_keys in (("host", self.side.host_keys()), ("faulty", on_disk)):
            tracked = self.side.tracker.residencies(tier)
            assert tracked == true_keys, (
                f"{tier}: {len(tracked - true_keys)} are not there, {len(true_keys - tracked)} are"
            )
            announced = {
                (address.group_idx, address.block_hash)
                for address in self.consumer.index
                if address.ownership == tier
            }
            last_hashes = {(key_group(key), bytes(key_hash(key))) for key in true_keys}
            assert last_hashes <= announced, tier
            if not true_keys:
                assert not announced, tier

    def _settled_disk_keys(self) -> frozenset[ChunkKey]:
        """What is on disk; the janitor deletes on its own time, and says so in the next report."""
        end = time.monotonic() + 5
        while True:
            self._step()
            found = self._disk_keys()
            if self.side.tracker.residencies("faulty") == found or time.monotonic() > end:
                return found

    def _disk_keys(self) -> frozenset[ChunkKey]:
        names = (path.name for path in self.store.glob("namespaces/*/*/*"))
        return frozenset(ChunkKey(bytes.fromhex(name.partition(".")[0])) for name in names)

    def _check(self, request: Request) -> None:
        """The answer is that of an engine without offloading, and it did not wait too long."""
        explanation = self.side.explain(request.request_id)
        if explanation is not None:
            waited = explanation.verdict.waited_s
            self.figures.longest_wait_s = max(self.figures.longest_wait_s, waited)
        prompt = tuple(request.tokens[: request.num_prompt_tokens])
        key = (prompt, request.sampling.max_tokens)
        if key not in self.expected:
            [self.expected[key]] = self.reference.generate([list(prompt)], request.sampling)
        self._compare(self.engine.answer(request), self.expected[key])

    def _compare(self, answer: Answer, expected: Answer) -> None:
        """Scores are the reference's, and so are tokens; a tie may end the comparison."""
        assert len(answer.tokens) == len(expected.tokens)
        for place, (scores, true) in enumerate(zip(answer.logits, expected.logits, strict=True)):
            difference = max(abs(a - b) for a, b in zip(scores, true, strict=True))
            assert difference <= TOLERANCE, f"{answer.request_id}, token {place}: {difference}"
            self.figures.largest_difference = max(self.figures.largest_difference, difference)
            drawn = answer.tokens[place], expected.tokens[place]
            if drawn[0] != drawn[1]:
                assert true[drawn[1]] - true[drawn[0]] <= TOLERANCE, f"{answer.request_id}, {place}"
                self.figures.ties += 1
                return

    def _request(self) -> tuple[list[int], SamplingParams]:
        prompt = self.random.choice(self.prefixes)[: self.random.randrange(10, 300)]
        if self.random.random() < 0.7:
            prompt = prompt + self._tokens(self.random.randrange(1, 40))
        return prompt, SamplingParams(
            max_tokens=self.random.randrange(1, MAX_ANSWER), keep_logits=True
        )

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
    figures = soak.figures
    with capsys.disabled():
        print(  # noqa: T201 - the run's figures
            f"\n{arch} {mode}: {figures.requests} requests, {figures.aborts} aborted, "
            f"{figures.resets} resets, {loaded:,.0f} tokens loaded, {evicted:,.0f} evictions, "
            f"index exact at {figures.quiet_points} quiet points, scores within "
            f"{figures.largest_difference:.0e} ({figures.ties} ties), "
            f"longest wait {figures.longest_wait_s:.2f} s of {LOAD_DEADLINE_S}"
        )
    assert loaded > 0
    assert evicted > 0
    # Requests are asked about in steps, so the first step after the deadline ends a wait.
    assert figures.longest_wait_s <= LOAD_DEADLINE_S + figures.longest_gap_s
