from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstrata.bench import runtime
from kvstrata.bench.planning import hybrid_layout
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.telemetry import metrics

if TYPE_CHECKING:
    from kvstrata.runtime.seam import BlockTables

SMALL = runtime.Scale(
    num_running=3,
    num_indexed=500,
    num_steps=180,
    num_arrivals=4,
    num_rounds=2,
    num_prompts=2,
    prompt_tokens=96,
    answer_tokens=3,
    num_warm_rounds=1,
)


def test_the_runtime_is_measured() -> None:
    report = runtime.run(SMALL)

    assert [goal.name for goal in report.goals] == [
        "scheduler side of a decode step",
        "tiny llama, no hits",
        "tiny qwen3_next, no hits",
        "demo's llama, no hits",
        "demo's qwen3_next, no hits",
    ]
    assert all(goal.value > 0 for goal in report.goals)
    assert [size for size, _ in report.series[0].rows] == [50, 90, 99, 100]
    assert json.dumps(report.as_json())


@pytest.fixture
def engine() -> runtime.FakeEngine:
    return runtime.FakeEngine(cut_into_chunks(hybrid_layout()), num_indexed=500)


def stats(engine: runtime.FakeEngine, metric: metrics.Metric) -> float:
    return sum(sample.value for sample in engine.side.stats() if sample.name == metric.name)


def test_requests_are_restored_and_store_what_they_add(engine: runtime.FakeEngine) -> None:
    engine.start("one")
    engine.end_loads()
    assert stats(engine, metrics.HIT_TOKENS) == 7 * 528

    for _ in range(528):
        engine.step()
    engine.end_loads()
    assert stats(engine, metrics.STORE_BYTES) > 0
    assert not engine.side.hook_faults


def test_an_engine_is_asked_for_blocks_only_when_something_is_stored(
    engine: runtime.FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    tables = engine.request_blocks

    def ask(request_id: str) -> BlockTables:
        asked.append(request_id)
        return tables(request_id)

    engine.start("one")
    engine.end_loads()
    engine.step()
    monkeypatch.setattr(engine, "request_blocks", ask)

    for _ in range(176):
        engine.step()

    assert asked == ["one"]
