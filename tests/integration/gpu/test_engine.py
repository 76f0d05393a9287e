"""Needs a GPU: the embedded engine and its offloading on CUDA give what they give on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvstrata.config.parsing import parse_config
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.models.registry import ARCHITECTURES
from kvstrata.engine.offloading import offloading
from kvstrata.engine.tiny import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

PROMPTS = [[(7 * i + n) % 251 for i in range(length)] for n, length in enumerate((300, 97, 1))]
GREEDY = SamplingParams(max_tokens=12, keep_logits=True)
BLOCKS = 2000


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cuda_gives_the_tokens_and_scores_of_the_cpu(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path / "model")
    answers = {}
    for device in ("cpu", "cuda"):
        options = EngineOptions(num_blocks=BLOCKS, device=device)
        with Engine(tmp_path / "model", options) as engine:
            answers[device] = engine.generate(PROMPTS, GREEDY)

    for on_cpu, on_gpu in zip(answers["cpu"], answers["cuda"], strict=True):
        assert on_gpu.tokens == on_cpu.tokens
        scores = torch.tensor(on_gpu.logits), torch.tensor(on_cpu.logits)
        torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cache_restored_to_the_gpu_gives_what_a_local_hit_gives(
    arch: str, tmp_path: Path
) -> None:
    make_tiny(arch, tmp_path / "model")
    config = parse_config(
        {
            "host": {"capacity": "64MiB"},
            "hybrid_chunk_size": 64,
            "tiers": [{"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}],
            "load": {"decide": "always"},
        }
    )
    options = EngineOptions(num_blocks=BLOCKS, device="cuda")
    parts = offloading(config, tmp_path / "model", "cuda")
    with Engine(tmp_path / "model", options, parts) as engine:
        [cold] = engine.generate(PROMPTS[:1], GREEDY)
        [local] = engine.generate(PROMPTS[:1], GREEDY)
        restored = []
        for tier in ("host", "filesystem"):
            engine.run_until_idle()
            engine.scheduler.blocks.pool.forget_all()
            if tier == "filesystem":
                assert engine.reset_cache()
            restored += engine.generate(PROMPTS[:1], GREEDY)

    assert local.local_hit_tokens > 0
    for answer in restored:
        assert answer.external_hit_tokens == local.local_hit_tokens
        assert answer.logits == local.logits
        assert answer.tokens == cold.tokens
