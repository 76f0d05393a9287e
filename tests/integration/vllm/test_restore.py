"""Real vLLM: store, throw the device cache away, restore; everything as with a local hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]

ARCHITECTURES = ["llama", "mistral", "gemma3", "lfm2", "qwen3_next", "gpt_oss", "llama4"]


def settings(store: Path | None = None, **changes: Any) -> dict[str, Any]:
    tiers = [] if store is None else [{"kind": "filesystem", "path": str(store), "min_free": "0B"}]
    return {
        "host": {"capacity": "128MiB"},
        "tiers": tiers,
        "load": {"decide": "always"},
        **changes,
    }


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "chunks"


@pytest.fixture(scope="module")
def reference(arch: str, checkpoints: Any, serve: Any, prompt_of: Any) -> dict[int, Any]:
    """Answers of vLLM alone, by prompt length."""
    with serve(checkpoints.of(arch)) as plain:
        lengths = (1500, 1281, 1000)
        return {n: plain.ask(prompt_of(n, seed=n))[0].tokens for n in lengths}


@pytest.fixture(scope="module")
def served(
    arch: str,
    checkpoints: Any,
    serve: Any,
    store: Path,
    reference: dict[int, Any],  # noqa: ARG001 - vLLM allows one engine at a time
) -> Iterator[Any]:
    with serve(checkpoints.of(arch), settings(store)) as engine:
        yield engine


def loaded_tokens(engine: Any, tier: str) -> float:
    return sum(
        float(s.value)
        for s in engine.side.stats()
        if s.name == metrics.HIT_TOKENS.name and s.labels == (tier,)
    )


@pytest.mark.parametrize("length", [1500, 1281, 1000])
def test_host_and_disk_give_what_a_local_hit_gives(
    served: Any,
    reference: dict[int, Any],
    prompt_of: Any,
    length: int,
) -> None:
    prompt = prompt_of(length, seed=length)
    served.drop_device_cache()
    [cold] = served.ask(prompt)
    [local] = served.ask(prompt)
    assert local.cached_tokens > 0
    before = loaded_tokens(served, "host"), loaded_tokens(served, "filesystem")
    computed = served.cached_bytes()

    served.drop_device_cache()
    [from_host] = served.ask(prompt)
    host_bytes = served.cached_bytes()
    served.drop_device_cache()
    assert served.side.reset()
    [from_disk] = served.ask(prompt)
    disk_bytes = served.cached_bytes()

    assert from_host.cached_tokens == from_disk.cached_tokens == local.cached_tokens
    assert loaded_tokens(served, "host") - before[0] == local.cached_tokens
    assert loaded_tokens(served, "filesystem") - before[1] == local.cached_tokens
    for restored in (host_bytes, disk_bytes):
        common = computed.keys() & restored.keys()
        assert common
        assert [key for key in common if not restored[key] <= computed[key]] == []
    assert from_host.logprobs == from_disk.logprobs == local.logprobs
    assert cold.tokens == from_host.tokens == from_disk.tokens == reference[length]
    assert not served.side.hook_faults


def test_a_local_hit_goes_on_with_an_external_one(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(1500)
    [local] = [served.ask(prompt), served.ask(prompt)][1]
    served.drop_device_cache()
    served.ask(prompt[:700])  # a part of it comes back to the device

    [both] = served.ask(prompt)

    assert both.cached_tokens == local.cached_tokens
    assert both.tokens == local.tokens


def test_several_requests_at_once(arch: str, served: Any, prompt_of: Any) -> None:
    if arch == "lfm2":
        pytest.skip(
            "vLLM's own answers of LFM2 on CPU depend on the batch, without a connector too"
        )
    prompts = [prompt_of(1300, seed=seed) for seed in range(3)] + [prompt_of(50, seed=9)]
    alone = [served.ask(prompt)[0].tokens for prompt in prompts]
    served.drop_device_cache()

    together = served.ask(*prompts)

    assert [answer.tokens for answer in together] == alone
    assert all(answer.cached_tokens > 0 for answer in together[:3])
    served.drop_device_cache()
