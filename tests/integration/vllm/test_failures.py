"""Real vLLM: restarts, small pools, damaged stores and slow tiers cost time, never an answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "host": {"capacity": "64MiB"},
        "tiers": [{"kind": "filesystem", "path": str(folder), "min_free": "0B"}],
        "load": {"decide": "always", "deadline": "5s"},
        **changes,
    }


@pytest.mark.parametrize("arch", ["lfm2", "gemma3"])
def test_a_restarted_engine_finds_the_disk_store(
    arch: str,
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of(arch), settings(tmp_path / "store")) as first:
        [cold] = first.ask(prompt)
        first.settle()

    with serve(checkpoints.of(arch), settings(tmp_path / "store")) as second:
        [restored] = second.ask(prompt)

    assert restored.cached_tokens > 1000
    assert restored.tokens == cold.tokens


def test_a_store_of_other_weights_is_not_used(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of("llama"), settings(tmp_path / "store")) as first:
        first.ask(prompt)
        first.settle()
    files = sorted((tmp_path / "store").glob("namespaces/*/*/*"))

    with serve(checkpoints.of("llama", seed=1), settings(tmp_path / "store")) as second:
        [answer] = second.ask(prompt)
        second.settle()

    assert files
    assert answer.cached_tokens == 0
    assert all(file.exists() for file in files)


def test_damaged_files_cost_a_recompute(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of("lfm2"), settings(tmp_path / "store")) as served:
        [cold] = served.ask(prompt)
        served.drop_device_cache()
        served.side.reset()
        for number, file in enumerate(sorted((tmp_path / "store").glob("namespaces/*/*/*"))):
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw if number % 2 else raw[: len(raw) // 2])

        [answer] = served.ask(prompt)

        assert answer.cached_tokens == 0
        assert answer.tokens == cold.tokens
        served.drop_device_cache()


def test_a_hanging_tier_costs_its_deadline(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    hanging = {
        "kind": "custom",
        "name": "hanging",
        "store": "kvstrata.testing.hanging_store:HangingStore",
        "options": {"path": str(tmp_path / "store"), "seconds": 30},
    }
    changes = {"tiers": [hanging], "load": {"decide": "always", "deadline": "1s"}}
    with serve(checkpoints.of("llama"), settings(tmp_path / "store", **changes)) as served:
        start = time.monotonic()
        [answer] = served.ask(prompt)
        waited_s = time.monotonic() - start

    assert answer.cached_tokens == 0
    assert waited_s < 20  # far less than the tier would take


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_preemption_under_a_tiny_pool(
    mode: str,
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompts = [prompt_of(700, seed=seed) for seed in range(4)]
    with serve(checkpoints.of("gemma3")) as plain:
        expected = [plain.ask(prompt, max_tokens=150)[0].tokens for prompt in prompts]
    tiny = settings(tmp_path / "store", store={"mode": mode})
    options = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 512}

    with serve(checkpoints.of("gemma3"), tiny, **options) as served:
        for _ in range(2):
            answers = served.ask(*prompts, max_tokens=150)
            assert [answer.tokens for answer in answers] == expected
        served.drop_device_cache()
        assert not served.side.hook_faults
        assert served.side.num_leases == 0


def test_a_wrong_setting_stops_the_start(checkpoints: Any, serve: Any, tmp_path: Path) -> None:
    wrong = settings(tmp_path / "store") | {"hots": {}}

    with pytest.raises(Exception, match=r"hots.*host"), serve(checkpoints.of("llama"), wrong):
        pass
