"""Real vLLM with worker processes: tensor parallel ranks that share nothing but messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .adapter_folders import make_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

SCRIPT = Path(__file__).with_name("engine_process.py")


Prompt = tuple[list[int], str | None]
"""Tokens, and an adapter's folder."""


def run(model: Path, tier: dict[str, Any], prompts: Sequence[Prompt], **options: Any) -> Any:
    """What one engine saw, from its start to its end."""
    settings = {
        "host": {"capacity": "64MiB"},
        "tiers": [tier],
        "load": {"decide": "always"},
    }
    texts = map(json.dumps, (settings, options, prompts))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *texts],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first"')]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1])


def test_two_ranks_restore_from_host_and_after_a_restart_from_disk(
    checkpoints: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model = checkpoints.of("gemma3")
    tier = {"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}
    adapter = make_adapter(tmp_path / "adapter", model, seed=1)
    prompts = [(prompt_of(1500), None), (prompt_of(1500), str(adapter))]
    options = {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8}

    before = run(model, tier, prompts, **options)
    after = run(model, tier, prompts, **options)

    local = before["local"]
    assert before["was_reset"]
    assert all(answer["cached_tokens"] >= 1024 for answer in local)
    assert before["restored"] == local
    assert after["first"] == local
    assert local[0]["logprobs"] != local[1]["logprobs"], "the adapter changes nothing"
    names = {path.name.rpartition(".")[2] for path in (tmp_path / "store").glob("names*/*/*/*")}
    assert names == {"0of2", "1of2"}


def test_a_chunk_that_one_rank_could_not_write_is_not_offered(
    checkpoints: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """With recurrent states: vLLM itself finds none of them in worker processes on a CPU."""
    model = checkpoints.of("qwen3_next")
    lame = {
        "kind": "custom",
        "name": "lame",
        "store": "kvstrata.testing.lame_rank_store:LameRankStore",
        "options": {"path": str(tmp_path / "store"), "rank": 1, "most_tokens": 0},
    }
    prompts = [(prompt_of(1500), None)]

    before = run(model, lame, prompts, tensor_parallel_size=2)
    after = run(model, lame, prompts, tensor_parallel_size=2)

    assert before["restored"][0]["cached_tokens"] >= 1024, "host memory has it on both ranks"
    assert before["restored"][0]["tokens"] == before["first"][0]["tokens"]
    assert after["first"][0]["cached_tokens"] == 0
    assert after["first"][0]["tokens"] == before["first"][0]["tokens"]
