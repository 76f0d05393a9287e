"""Real vLLM: speculative decoding, media, sleep and retention, with caches that are thrown away."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstrata.telemetry import metrics

from .audio_model import AUDIO_TOKEN, make_audio_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def settings(store: Path | None = None, **changes: Any) -> dict[str, Any]:
    tiers = [] if store is None else [{"kind": "filesystem", "path": str(store), "min_free": "0B"}]
    return {
        "host": {"capacity": "64MiB"},
        "tiers": tiers,
        "load": {"decide": "always"},
        **changes,
    }


def loaded_tokens(engine: Any) -> float:
    return sum(float(s.value) for s in engine.side.stats() if s.name == metrics.HIT_TOKENS.name)


def make_draft(model: Path, folder: Path, seed: int) -> Path:
    """A copy of a checkpoint with some noise: it guesses right often, and not always."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    [weights] = model.glob("*.safetensors")
    noisy = {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(weights).items()
    }
    save_file(noisy, folder / weights.name, {"format": "pt"})
    return folder


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no numba, vLLM's search for n-grams runs as the plain Python that it is."""
    if "numba" in sys.modules:
        return

    def as_it_is(*args: Any, **options: Any) -> Any:
        return args[0] if args and not options else lambda function: function

    numba: Any = ModuleType("numba")
    numba.jit = numba.njit = as_it_is
    numba.prange, numba.get_num_threads = range, lambda: 1
    numba.set_num_threads = lambda number: None  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "numba", numba)


def guesses(engine: Any) -> tuple[int, int]:
    """How many guessed tokens vLLM has accepted and rejected."""
    counted = {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    return accepted, counted["vllm:spec_decode_num_draft_tokens"] - accepted


def check_guessing(engine: Any, prompt: list[int], expected: list[int]) -> None:
    """Answers and bytes with guesses, cold, from the device and restored."""
    [cold] = engine.ask(prompt, max_tokens=150)
    accepted, rejected = guesses(engine)
    assert accepted > 10
    assert rejected > 10
    continued = prompt + cold.tokens
    [local] = engine.ask(continued)
    computed = engine.cached_bytes()
    engine.drop_device_cache()
    before = loaded_tokens(engine)
    [restored] = engine.ask(continued)
    after = engine.cached_bytes()

    assert cold.tokens == expected
    assert loaded_tokens(engine) - before == restored.cached_tokens == local.cached_tokens
    assert restored.cached_tokens > len(prompt) + 100, "accepted tokens are stored"
    common = computed.keys() & after.keys()
    assert len(common) >= restored.cached_tokens // 32
    assert [key for key in common if not after[key] <= computed[key]] == []
    assert restored.logprobs == local.logprobs
    assert restored.tokens == local.tokens
    assert not engine.side.hook_faults


def test_a_draft_models_rejected_guesses_are_not_stored(
    checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model, prompt = checkpoints.of("llama"), prompt_of(500)
    drafts = [make_draft(model, tmp_path / f"draft-{seed}", seed) for seed in (1, 2)]
    common = {"block_size": 32, "disable_log_stats": False}

    def options(draft: Path) -> dict[str, Any]:
        speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        return {"speculative_config": speculation, **common}

    with serve(model, **common) as plain:
        [expected] = plain.ask(prompt, max_tokens=150)
    with serve(
        model, settings(tmp_path / "store", hybrid_chunk_size=32), **options(drafts[0])
    ) as engine:
        check_guessing(engine, prompt, expected.tokens)
        engine.settle()

    with serve(
        model, settings(tmp_path / "store", hybrid_chunk_size=32), **options(drafts[1])
    ) as other:
        [fresh] = other.ask(prompt)
    assert fresh.cached_tokens == 0, "another draft's cache is not this one's"


@pytest.mark.usefixtures("_uncompiled")
def test_rejected_ngrams_are_not_stored(checkpoints: Any, serve: Any, prompt_of: Any) -> None:
    model, prompt = checkpoints.of("gemma3"), prompt_of(40) * 12
    common = {"block_size": 32, "disable_log_stats": False, "prefix_cache_retention_interval": None}
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with serve(model, **common) as plain:
        [expected] = plain.ask(prompt, max_tokens=150)

    chunks = settings(hybrid_chunk_size=32)
    with serve(model, chunks, speculative_config=speculation, **common) as engine:
        check_guessing(engine, prompt, expected.tokens)


def test_what_was_heard_is_part_of_the_keys(serve: Any, prompt_of: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import

    model, words = make_audio_model(tmp_path / "model"), prompt_of(600)
    words = [word % AUDIO_TOKEN for word in words]
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=3, detokenize=False)

    def ask(engine: Any, seed: int) -> Any:
        noise = torch.randn(16000, generator=torch.Generator().manual_seed(seed)).numpy()
        prompt = {
            "prompt_token_ids": [*words[:300], AUDIO_TOKEN, *words[300:]],
            "multi_modal_data": {"audio": (noise, 16000)},
        }
        [output] = engine.llm.generate([prompt], sampling, use_tqdm=False)
        [said] = output.outputs
        logprobs = [{token: p.logprob for token, p in step.items()} for step in said.logprobs]
        return list(said.token_ids), logprobs, output.num_cached_tokens

    options = {"skip_tokenizer_init": False, "block_size": 32}
    with serve(model, **options) as plain:
        expected = [ask(plain, seed)[0] for seed in (1, 2, 3)]
    with serve(model, settings(hybrid_chunk_size=32), **options) as engine:
        first = ask(engine, 1)
        engine.drop_device_cache()
        second = ask(engine, 2)
        local = [ask(engine, 1), ask(engine, 2)]
        engine.drop_device_cache()
        restored = [ask(engine, 1), ask(engine, 2)]
        third = ask(engine, 3)
        loaded = loaded_tokens(engine)
        assert not engine.side.hook_faults

    assert second[2] == third[2] == 300 // 32 * 32, "the words before it are shared, no more"
    assert len({str(answer[1]) for answer in (*local, third)}) == 3, "what is heard matters"
    assert restored == local
    assert restored[0][2] > 600
    assert loaded > 2 * 600
    assert [first[0], second[0], third[0]] == expected


def test_nothing_from_before_a_sleep_is_served(
    checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    prompt, running = prompt_of(700), SamplingParams(max_tokens=50, detokenize=False)
    with serve(checkpoints.of("llama"), settings(tmp_path / "store")) as engine:
        [expected] = engine.ask(prompt)
        engine.settle()
        engine.llm.sleep(level=0)
        engine.llm.wake_up(["scheduling"])
        assert engine.ask(prompt)[0].cached_tokens > 0, "that was a pause"
        for level in (1, 2):
            before = engine.side.host_keys()
            busy = {"prompt_token_ids": prompt_of(400, seed=level)}
            engine.llm.llm_engine.add_request(f"busy-{level}", busy, running)
            for _ in range(3):
                engine.core.step()
            engine.llm.sleep(level=level)
            engine.llm.llm_engine.abort_request([f"busy-{level}"])  # vLLM has, and does not say so
            assert engine.llm.wake_up()

            [fresh] = engine.ask(prompt)
            [again] = engine.ask(busy["prompt_token_ids"])
            engine.drop_device_cache()
            [restored] = engine.ask(prompt)

            assert fresh.cached_tokens == again.cached_tokens == 0
            assert restored.cached_tokens > 0
            assert fresh.tokens == restored.tokens == expected.tokens
            assert not before & engine.side.host_keys()
        assert not engine.side.hook_faults


def test_states_that_vllm_retains_in_between_are_restored(
    checkpoints: Any, serve: Any, prompt_of: Any
) -> None:
    prompt = prompt_of(1500)
    options = {"prefix_cache_retention_interval": 256, "max_num_batched_tokens": 512}
    with serve(checkpoints.of("lfm2"), **options) as plain:
        [expected] = plain.ask(prompt[:1100])
    with serve(checkpoints.of("lfm2"), settings(), **options) as engine:
        engine.ask(prompt)
        [local] = engine.ask(prompt[:1100])
        engine.drop_device_cache()
        [restored] = engine.ask(prompt[:1100])
        loaded = loaded_tokens(engine)
        assert not engine.side.hook_faults

    assert loaded == restored.cached_tokens == local.cached_tokens == 1024
    assert restored.logprobs == local.logprobs
    assert restored.tokens == expected.tokens
