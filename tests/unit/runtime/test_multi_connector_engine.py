"""Several connectors under the embedded engine: whatever they do, the answers are the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.ids import GroupId
from kvstrata.engine import ConnectorParts, Engine, EngineOptions, SamplingParams
from kvstrata.engine.tiny import make_tiny
from kvstrata.runtime.multi_connector import Child, MultiScheduler, MultiWorker
from kvstrata.runtime.seam import EndedLoads, Match
from kvstrata.testing.memory_connector import Behaviour, MemoryScheduler, MemoryWorker

from .fake_children import FakeScheduler, FakeWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.seam import SchedulerConnector, WorkerConnector

ARCHITECTURES = ["llama", "lfm2"]
SAMPLING = SamplingParams(max_tokens=6)
OPTIONS = EngineOptions(num_blocks=200)
SCHEDULER_HOOKS = [
    "has_pending_work",
    "bind_scheduler_context",
    "add_request",
    "match",
    "allocated",
    "plan_step",
    "report",
    "finished",
    "reset",
    "take_events",
    "close",
]
WORKER_HOOKS = ["register_caches", "start_step", "finish_step", "close"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    make_tiny(request.param, path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(7)  # noqa: S311 - prompts, not secrets
    shared = [rng.randrange(64) for _ in range(100)]
    return [shared + [rng.randrange(64) for _ in range(n)] for n in (3, 40, 77)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with Engine(folder, OPTIONS) as engine:
        return [answer.tokens for answer in engine.generate(prompts, SAMPLING)]


class Boaster(FakeScheduler):
    """Promises as much as it can, and fails every load."""

    def __init__(self, raises: Sequence[str] = ()) -> None:
        super().__init__(0, raises=raises)
        self.layout: KVLayout | None = None

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        super().match(request_id, local_tokens)
        assert self.layout is not None
        stride = self.layout.hit_stride_tokens
        return Match(max(0, 100 // stride * stride - local_tokens))

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        loads = {call[0] for call in self.named("allocated") if call[2]}
        self.calls = [call for call in self.calls if call[0] != "allocated"]
        super().report(reports)
        return EndedLoads(failed=frozenset(loads))


class Pair:
    """Memory children, and one more if a test brings it, under one engine."""

    def __init__(
        self,
        folder: Path,
        weights: Sequence[float] = (1.0, 1.0),
        *,
        bad: tuple[FakeScheduler, FakeWorker] | None = None,
        options: EngineOptions = OPTIONS,
    ) -> None:
        self.now = 0.0
        self.halves: list[MemoryScheduler] = []
        self.workers = [MemoryWorker() for _ in weights]
        self._weights = weights
        self._bad = bad
        self.engine = Engine(folder, options, ConnectorParts(self._scheduler, self._worker))

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers = [answer.tokens for answer in self.engine.generate(prompts, SAMPLING)]
        self.engine.run_until_idle(step_limit=1000)
        self.multi.check_invariants()
        self.engine.scheduler.check_invariants()
        return answers

    def forget_device(self) -> None:
        self.engine.scheduler.blocks.pool.forget_all()

    def _scheduler(self, layout: KVLayout) -> SchedulerConnector:
        self.halves = [MemoryScheduler(layout) for _ in self._weights]
        children = [
            Child(f"memory-{place}", half, weight, 1.0, supports_hybrid_groups=True)
            for place, (half, weight) in enumerate(zip(self.halves, self._weights, strict=True))
        ]
        if self._bad:
            if isinstance(self._bad[0], Boaster):
                self._bad[0].layout = layout
            children.insert(0, Child("bad", self._bad[0], 100.0, 0.5, supports_hybrid_groups=True))
        self.multi = MultiScheduler(children, layout, self._clock)
        return self.multi

    def _worker(self, rank: int) -> WorkerConnector:
        del rank
        children: list[tuple[str, WorkerConnector]] = [
            (f"memory-{place}", worker) for place, worker in enumerate(self.workers)
        ]
        return MultiWorker([*children, ("bad", self._bad[1])] if self._bad else children)

    def _clock(self) -> float:
        self.now += 0.01
        return self.now


def test_both_children_store_and_the_one_with_more_loads(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(folder)
    with pair.engine:
        assert pair.generate(prompts) == expected
        assert pair.halves[0].stored == pair.halves[1].stored
        pair.halves[0].stored.clear()
        pair.forget_device()
        assert pair.generate(prompts) == expected
        stats = pair.multi.stats()
    assert (stats["memory-0"].loads, stats["memory-0"].hits) == (0, 0)
    assert stats["memory-1"].loads == stats["memory-1"].hits == len(prompts)
    assert stats["memory-1"].loaded_tokens == stats["memory-1"].hit_tokens > 0


@pytest.mark.parametrize(("weight", "winner"), [(1.0, 1), (50.0, 0)])
def test_weight_decides_between_a_part_and_the_whole(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], weight: float, winner: int
) -> None:
    pair = Pair(folder, (weight, 1.0))
    with pair.engine:
        assert pair.generate(prompts[2:]) == expected[2:]
        whole = set(pair.halves[0].stored)
        assert pair.generate(prompts[:1]) == expected[:1]
        pair.halves[0].stored -= whole - _of_prefix(pair, prompts[0])
        pair.forget_device()
        assert pair.generate(prompts[2:]) == expected[2:]
        stats = list(pair.multi.stats().values())
    assert 0 < stats[0].hit_tokens < stats[1].hit_tokens
    assert [s.loads for s in stats] == [int(winner == 0), int(winner == 1)]


def _of_prefix(pair: Pair, prompt: Sequence[int]) -> set[ChunkKey]:
    """Keys of the blocks that a prompt's own prefix needs."""
    half = pair.halves[0]
    request = pair.engine.add_request(prompt, SAMPLING)
    search = half._search  # noqa: SLF001 - the keys are the search's
    hashes = list(request.hashes)
    pair.engine.abort(request.request_id)
    return {
        search.key(hashes, GroupId(g), position)
        for g, group in enumerate(pair.engine.layout.groups)
        for position in range(len(prompt) // group.block_tokens)
    }


def test_child_that_raises_in_every_hook_changes_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(folder, bad=(Boaster(SCHEDULER_HOOKS), FakeWorker(WORKER_HOOKS)))
    with pair.engine:
        assert pair.generate(prompts) == expected
        pair.forget_device()
        assert pair.generate(prompts) == expected
        assert pair.multi.stats()["bad"].is_stopped
        assert pair.multi.stats()["memory-0"].loads == len(prompts)
        assert pair.engine.reset_cache()


@pytest.mark.parametrize("hook", ["match", "allocated", "plan_step", "report", "finished", "none"])
def test_child_that_promises_everything_and_raises_in_one_hook_changes_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], hook: str
) -> None:
    pair = Pair(folder, bad=(Boaster([hook]), FakeWorker()))
    with pair.engine:
        assert pair.generate(prompts) == expected
        pair.forget_device()
        assert pair.generate(prompts) == expected
        stats = pair.multi.stats()["bad"]
        assert stats.loads == stats.failed_loads
        assert stats.pending_loads == 0


@pytest.mark.parametrize("hook", ["register_caches", "start_step", "finish_step"])
def test_child_whose_worker_half_raises_during_its_load_changes_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], hook: str
) -> None:
    pair = Pair(folder, bad=(Boaster(), FakeWorker([hook])))
    with pair.engine:
        assert pair.generate(prompts) == expected
        stats = pair.multi.stats()["bad"]
        assert stats.is_stopped
        assert stats.failed_loads == stats.loads >= 1
        pool = pair.engine.scheduler.blocks.pool
        assert pool.num_free == pool.num_blocks - 1


def test_blocks_stay_withdrawn_if_a_rank_cannot_be_stopped(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(folder, bad=(Boaster(), FakeWorker(["start_step", "close"])))
    with pair.engine:
        assert pair.generate(prompts) == expected
        pool = pair.engine.scheduler.blocks.pool
        assert pool.num_free < pool.num_blocks - 1


def test_request_waits_for_an_undecided_child_until_its_deadline(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(folder, bad=(FakeScheduler(None), FakeWorker()))
    with pair.engine:
        assert pair.generate(prompts) == expected
        stats = pair.multi.stats()["bad"]
    assert (stats.deadline_misses, stats.undecided) == (len(prompts), len(prompts))
    assert 0.5 <= pair.now < 5.0


def test_failed_loads_go_to_the_other_child_or_are_computed(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(folder)
    with pair.engine:
        assert pair.generate(prompts) == expected
        pair.forget_device()
        pair.halves[0].behaviour = Behaviour(failing_loads=2, load_steps=2)
        assert pair.generate(prompts) == expected
        stats = pair.multi.stats()["memory-0"]
    assert stats.failed_loads == 2
    assert stats.loads > 2


@pytest.mark.slow
def test_answers_survive_preemption_with_two_children(
    folder: Path, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(max_tokens=60)
    prompts = [prompt[:length] for prompt in prompts for length in (103, 109, 177)]
    with Engine(folder, OPTIONS) as engine:
        expected = [answer.tokens for answer in engine.generate(prompts, sampling)]
    num_blocks = {"llama": 22, "lfm2": 62}[folder.name]
    pair = Pair(folder, options=EngineOptions(num_blocks=num_blocks, max_step_tokens=48))
    with pair.engine:
        answers = pair.engine.generate(prompts, sampling)
        assert [answer.tokens for answer in answers] == expected
        assert sum(answer.num_preemptions for answer in answers)
        assert pair.multi.stats()["memory-0"].loads
        pair.multi.check_invariants()
