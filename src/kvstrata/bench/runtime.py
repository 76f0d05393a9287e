"""What offloading costs an engine that gets nothing out of it: per step, per request, overall.

The scheduler half is driven alone, as an engine would in the middle of its work: many requests that
each draw a token a step, ranks that report every copy in the next step. The whole is measured with
the embedded engine, where every prompt is new, so that all is stored and nothing restored.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstrata.bench.planning import hybrid_layout
from kvstrata.bench.report import Goal, Report, Series
from kvstrata.config.parsing import parse_config
from kvstrata.core.chunk_grid import ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.spans import ceil_div
from kvstrata.hierarchy.tier_stack import TierStack
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.policies.registry import make_policy
from kvstrata.runtime.message_channel import Outbox
from kvstrata.runtime.messages import RankReport, decode_step, encode
from kvstrata.runtime.scheduler_side import Announcing, SchedulerSide, Wiring
from kvstrata.runtime.seam import NewRequest, OfferedState, RequestProgress, StepProgress
from kvstrata.showcase import models as showcase
from kvstrata.telemetry.event_tracker import make_tracker
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.transfers.copy_queue import CopyReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.engine import Engine, SamplingParams
    from kvstrata.runtime.seam import BlockTables, BlockView

PROMPT_TOKENS: Final = 4_096
MODELS: Final = ("llama", "qwen3_next")
_CAPACITY: Final = "2TiB"
"""Of the index; no memory is taken for it."""
_ARENA: Final = "16MiB"
"""Of the measured engine: full after the first rounds, so that storing means evicting."""
_VOCABULARY: Final = 256


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is served."""

    num_running: int = 64
    num_indexed: int = 100_000
    num_steps: int = 1_056
    """Of decoding: every group completes a chunk of every request twice or more."""
    num_arrivals: int = 200
    num_rounds: int = 24
    """With and without offloading, in random order."""
    num_prompts: int = 8
    """Answered side by side in one round."""
    prompt_tokens: int = 528
    answer_tokens: int = 16
    num_warm_rounds: int = 4
    """Not measured."""


class FakeEngine:
    """An engine's scheduler without anything to compute; ranks copy at once.

    Args:
        geometry: the chunks.
        num_indexed: chunks in host memory before anything is measured.
    """

    def __init__(self, geometry: ChunkGeometry, num_indexed: int) -> None:
        config = parse_config({"host": {"capacity": _CAPACITY}, "load": {"decide": "always"}})
        policy = make_policy(config.host.eviction, config.host.capacity)
        host = HostMemoryIndex(config.host.capacity, policy)
        stack = TierStack(host, (), time.monotonic)
        wiring = Wiring(stack, Outbox(time.monotonic), (), 1)
        announcing = Announcing(make_tracker(config))
        self.side = SchedulerSide(config, geometry, wiring, announcing, time.monotonic)
        self.side.bind_scheduler_context(self)
        self.requests: dict[str, FakeRequest] = {}
        self._geometry = geometry
        self._first_tokens = itertools.count(step=PROMPT_TOKENS)
        self._known_prompts = deque[list[int]]()
        while len(host) < num_indexed:
            self._known_prompts.append(self._index_prompt(host))

    def start(self, name: str) -> float:
        """Take a request whose chunks are in host memory; seconds of the scheduler half."""
        request = FakeRequest(name, self._known_prompts[0], self._geometry)
        self._known_prompts.rotate()
        self.requests[name] = request
        tables = request.copied_tables()
        new = NewRequest(name, request.hasher.hashes, request.tokens, len(request.tokens))
        start = time.perf_counter()
        self.side.add_request(new)
        match = self.side.match(name, 0)
        assert match is not None
        self.side.allocated(name, tables, match.external_tokens)
        seconds = time.perf_counter() - start
        assert match.external_tokens > PROMPT_TOKENS // 2, "it is a hit"
        return seconds

    def step(self) -> float:
        """One token for every request; seconds of the scheduler half."""
        progress = StepProgress([request.advance() for request in self.requests.values()])
        start = time.perf_counter()
        message = self.side.plan_step(progress)
        planned_s = time.perf_counter() - start
        report = _copied(message)
        start = time.perf_counter()
        self.side.report([report])
        return planned_s + time.perf_counter() - start

    def end_loads(self) -> None:
        """A step in which nothing is computed."""
        self.side.report([_copied(self.side.plan_step(StepProgress(())))])

    def arrive_and_leave(self) -> float:
        """A request arrives, is restored and ends; seconds of its arrival."""
        seconds = self.start("passing")
        self.end_loads()
        self.side.finished("passing")
        del self.requests["passing"]
        return seconds

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks; nobody takes them here."""

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let blocks go."""

    def get_block(self, block_id: int) -> BlockView:
        """Not asked for by eager stores."""
        raise NotImplementedError

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """Not asked for by eager stores."""
        raise NotImplementedError

    def request_blocks(self, request_id: str) -> BlockTables:
        """A request's blocks, copied as the embedded engine does."""
        return self.requests[request_id].copied_tables()

    def waiting_requests(self) -> Sequence[str]:
        """None: all run."""
        return ()

    def _index_prompt(self, host: HostMemoryIndex) -> list[int]:
        """Put every chunk of a new prompt into host memory."""
        first = next(self._first_tokens)
        tokens = list(range(first, first + PROMPT_TOKENS))
        hasher = PrefixHasher(self._geometry.layout.hash_block_tokens)
        hasher.extend(tokens)
        grid = ChunkGrid(self._geometry, hasher.hashes)
        for chunks in self._geometry.groups:
            keys = list(grid.keys(chunks.group_id))
            host.settle(host.reserve(keys, [chunks.chunk_bytes] * len(keys)).granted)
        return tokens


class FakeRequest:
    """A request that draws a token a step.

    Args:
        name: its id.
        prompt: its tokens.
        geometry: for its blocks and states.
    """

    def __init__(self, name: str, prompt: Sequence[int], geometry: ChunkGeometry) -> None:
        self.tokens = list(prompt)
        self.hasher = PrefixHasher(geometry.layout.hash_block_tokens)
        self.hasher.extend(prompt)
        self._name = name
        self._geometry = geometry

    def copied_tables(self) -> BlockTables:
        """Its blocks; which ones does not matter here."""
        return tuple(
            tuple(range(1, ceil_div(len(self.tokens), chunks.group.block_tokens) + 1))
            for chunks in self._geometry.groups
        )

    def answer(self, count: int) -> None:
        """Draw tokens."""
        drawn = [self.tokens[-1] + 1] * count
        self.tokens.extend(drawn)
        self.hasher.extend(drawn)

    def advance(self) -> RequestProgress:
        """Draw a token and compute it; states exist where they can."""
        self.answer(1)
        computed = len(self.tokens)
        states = tuple(
            OfferedState(chunks.group_id, 1, computed)
            for chunks in self._geometry.recurrent
            if computed % chunks.chunk_tokens == 0
        )
        return RequestProgress(self._name, computed, states)


@dataclass(frozen=True, slots=True)
class SchedulerCosts:
    """Seconds of the scheduler half, sorted."""

    steps: list[float]
    arrivals: list[float]


class Shares(NamedTuple):
    """Throughput as a share of that without offloading."""

    fastest: float
    """Of the fastest rounds."""
    median: float
    """Of all rounds, each with the one beside it."""


class Throughput(NamedTuple):
    """What was measured on one model."""

    num_rounds: int
    offloaded: Shares
    noise: Shares
    """Of a second engine without offloading: what the machine alone makes of it."""


def run(scale: Scale | None = None) -> Report:
    """Measure the scheduler half alone, then the engine with and without it."""
    scale = scale or Scale()
    costs = measure_scheduler(scale)
    fewer = replace(scale, num_rounds=ceil_div(scale.num_rounds, 3), num_warm_rounds=1)
    models = {f"tiny {model}": measure_engine(model, scale) for model in MODELS} | {
        f"demo's {model}": measure_engine(model, fewer, showcase.MODELS[model]) for model in MODELS
    }
    return Report(
        name="runtime",
        setting=(
            f"{scale.num_running} running requests of {PROMPT_TOKENS:,} tokens and more, 8 groups "
            f"(2 full, 3 window, 3 recurrent), {scale.num_indexed:,} chunks in host memory; models "
            f"on one compute thread, {scale.num_prompts} new prompts of {scale.prompt_tokens} "
            f"tokens and answers of {scale.answer_tokens}, fastest of {scale.num_rounds} rounds "
            f"({fewer.num_rounds} of the demo's models)"
        ),
        goals=(
            Goal("scheduler side of a decode step", statistics.mean(costs.steps) * 1e3, 1.0, "ms"),
            *(
                Goal(f"{model}, no hits", found.offloaded.fastest, 0.97, "of without", "at least")
                for model, found in models.items()
            ),
        ),
        series=(
            Series(
                "Scheduler side (ms)",
                "percentile",
                ("decode step", "new request, full hit"),
                tuple(
                    (percent, (_at(costs.steps, percent) * 1e3, _at(costs.arrivals, percent) * 1e3))
                    for percent in (50, 90, 99, 100)
                ),
            ),
            *(_series(model, found) for model, found in models.items()),
        ),
    )


def measure_scheduler(scale: Scale) -> SchedulerCosts:
    """Decode steps of many requests, then arrivals of others beside them."""
    engine = FakeEngine(cut_into_chunks(hybrid_layout()), scale.num_indexed)
    for index in range(scale.num_running):
        engine.start(f"running-{index}")
    engine.end_loads()
    for index, request in enumerate(engine.requests.values()):
        request.answer(index * PROMPT_TOKENS // (8 * scale.num_running))  # not all in step
    engine.step()
    gc.collect()
    steps = sorted(engine.step() for _ in range(scale.num_steps))
    arrivals = sorted(engine.arrive_and_leave() for _ in range(scale.num_arrivals))
    assert not engine.side.hook_faults
    return SchedulerCosts(steps, arrivals)


def measure_engine(
    model: str, scale: Scale, changes: Mapping[str, Any] = MappingProxyType({})
) -> Throughput:
    """Engines with and without offloading, in turn, on prompts that none of them has seen.

    Args:
        model: its architecture.
        scale: how much is served.
        changes: what its tiny checkpoint has otherwise.
    """
    from kvstrata.engine import Engine, EngineOptions, SamplingParams  # noqa: PLC0415 - needs torch
    from kvstrata.engine.offloading import offloading  # noqa: PLC0415
    from kvstrata.engine.tiny import make_tiny  # noqa: PLC0415
    from kvstrata.showcase.compute_threads import compute_threads  # noqa: PLC0415

    options = EngineOptions(cache_capacity="64MiB", max_running=scale.num_prompts)
    config = parse_config({"host": {"capacity": _ARENA}})
    sampling = SamplingParams(max_tokens=scale.answer_tokens)
    with tempfile.TemporaryDirectory() as temporary, compute_threads(1):
        folder = Path(temporary) / model
        make_tiny(model, folder, **changes)
        with (
            Engine(folder, options) as without,
            Engine(folder, options) as again,
            Engine(folder, options, offloading(config, folder)) as offloaded,
        ):
            race = Race((without, again, offloaded), sampling, scale)
            rounds = [race.run() for _ in range(scale.num_warm_rounds + scale.num_rounds)]
    counted = rounds[scale.num_warm_rounds :]
    return Throughput(scale.num_rounds, _shares(counted, 2), _shares(counted, 1))


class Race:
    """Engines that answer the same prompts, one after the other.

    Args:
        engines: who takes part.
        sampling: of the answers.
        scale: how many prompts, and how long.
    """

    def __init__(self, engines: Sequence[Engine], sampling: SamplingParams, scale: Scale) -> None:
        self._engines = engines
        self._sampling = sampling
        self._scale = scale
        self._random = random.Random(0)  # noqa: S311 - equal prompts in every run

    def run(self) -> list[float]:
        """Answer new prompts; each engine's seconds."""
        prompts = [self._prompt() for _ in range(self._scale.num_prompts)]
        order = list(range(len(self._engines)))
        self._random.shuffle(order)
        seconds = {index: self._answer_s(self._engines[index], prompts) for index in order}
        return [seconds[index] for index in range(len(self._engines))]

    def _prompt(self) -> list[int]:
        return [self._random.randrange(_VOCABULARY) for _ in range(self._scale.prompt_tokens)]

    def _answer_s(self, engine: Engine, prompts: list[list[int]]) -> float:
        """Seconds until the last answer; stores then still under way end before the next turn."""
        start = time.perf_counter()
        answers = engine.generate(prompts, self._sampling)
        seconds = time.perf_counter() - start
        assert not any(answer.external_hit_tokens for answer in answers)
        engine.run_until_idle()
        return seconds


def _shares(rounds: Sequence[Sequence[float]], place: int) -> Shares:
    """One engine beside the first."""
    return Shares(
        min(seconds[0] for seconds in rounds) / min(seconds[place] for seconds in rounds),
        statistics.median(seconds[0] / seconds[place] for seconds in rounds),
    )


def _series(model: str, found: Throughput) -> Series:
    return Series(
        f"{model}: throughput as a share of without, and of two without (noise)",
        "rounds",
        ("fastest", "median", "noise, fastest", "noise, median"),
        ((found.num_rounds, (*found.offloaded, *found.noise)),),
    )


def _at(values: Sequence[float], percent: int) -> float:
    """The value that so many percent do not exceed."""
    return values[max(0, ceil_div(len(values) * percent, 100) - 1)]


def _copied(message: bytes) -> bytes:
    """What a rank says that has copied everything it was sent."""
    jobs = decode_step(message).copies
    reports = tuple(CopyReport(job.job_id, frozenset(), 1, 1e-3) for job in jobs)
    return encode(RankReport(copy_reports=reports))
