from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvstrata.bench import engine
from kvstrata.bench.planning import hybrid_layout
from kvstrata.cli.bench import show

SMALL = engine.Scale(
    num_running=4,
    contexts=(64, 600),
    main_context=600,
    num_steps=20,
    architectures=("llama", "lfm2"),
    prompt_tokens=70,
    num_rounds=1,
)


def test_steps_and_prefills_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = engine.run(SMALL)

    assert [goal.name for goal in report.goals][:3] == [
        "a step while all decode",
        "a step with a chunk of a prefill",
        "prefill, llama",
    ]
    assert all(goal.value > 0 for goal in report.goals)
    steps, prefills = report.series
    assert [size for size, _ in steps.rows] == [64, 600]
    assert [name for name, _ in prefills.rows] == ["llama", "lfm2"]
    assert json.dumps(report.as_json())
    show(report, as_json=False)
    assert "lfm2" in capsys.readouterr().out


def test_a_load_stays_as_it_is() -> None:
    load = engine.Load(hybrid_layout(), SMALL, 600)
    for _ in range(SMALL.num_steps):
        load.replace_oldest()
        assert load.step() > 0
        load.scheduler.check_invariants()

    assert len(load.scheduler.requests) == SMALL.num_running
    assert all(request.num_preemptions == 0 for request in load.scheduler.requests.values())


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_is_not_installed_is_left_out(missing: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
from kvstrata.bench import engine
report = engine.run(engine.Scale(num_running=2, contexts=(64,), main_context=64, num_steps=4))
assert len(report.goals) == 2, report.goals
assert len(report.series) == 1
print(report.setting)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert "no prefills: torch or transformers is not installed" in done.stdout
