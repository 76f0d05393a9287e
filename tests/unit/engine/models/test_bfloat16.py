"""In bfloat16, models stray from float32 no further than `transformers` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.engine.ranks import LocalRank, RankSettings
from kvstrata.engine.scheduling.step import SamplingParams, ScheduledSequence, StepPlan

CUTS = [48, 49, 50, 90, 91, 92, 93, 94, 95, 96, 97]


@pytest.mark.parametrize("arch", ["mistral", "gemma3", "deepseek_v3"])
def test_near_float32(make_parity: Any, arch: str) -> None:  # noqa: ANN401
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    parity = make_parity(arch)
    prompt = parity.prompt(97)
    ends = [stop - 1 for stop in CUTS]
    expected = parity.expected(prompt)[ends]
    found = _in_bfloat16(parity, prompt)
    parity.reference = AutoModelForCausalLM.from_pretrained(parity.folder, dtype=torch.bfloat16)
    theirs = parity.expected(prompt)[ends].float()
    assert _distance(found, expected) < 1.5 * _distance(theirs, expected)
    assert _distance(found, expected) < 0.1 * _distance(expected, expected.roll(1, 0))


def _in_bfloat16(parity: Any, prompt: list[int]) -> torch.Tensor:  # noqa: ANN401
    rank = LocalRank(RankSettings(folder=parity.folder, dtype="bfloat16"))
    rank.allocate(64)
    tables = tuple(
        list(range(1 + 10 * index, 11 + 10 * index))
        for index, _ in enumerate(rank.plan.layout.groups)
    )
    rows, start = [], 0
    for stop in CUTS:
        sequence = ScheduledSequence(
            "one", start, prompt[start:stop], tables, SamplingParams(keep_logits=True)
        )
        (result,) = rank.execute(StepPlan([sequence]))
        rows.append(result.logits["one"])
        start = stop
    rank.close()
    return torch.tensor(rows)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().median())
