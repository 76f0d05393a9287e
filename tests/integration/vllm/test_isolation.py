"""Real vLLM: what belongs to other salts, weights or limits is never served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def served(checkpoints: Any, serve: Any, tmp_path: Path) -> Iterator[Any]:
    settings = {
        "host": {"capacity": "128MiB"},
        "tiers": [{"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}],
        "load": {"decide": "always"},
    }
    with serve(checkpoints.of("lfm2"), settings, max_num_seqs=4) as engine:
        yield engine


def salted(engine: Any, prompt: list[int], **extra: Any) -> Any:
    """An answer to a prompt with a salt, or with limits."""
    from vllm import SamplingParams  # noqa: PLC0415

    limits = extra.pop("limits", None)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        extra_args=None if limits is None else {"kv_transfer_params": limits},
    )
    [output] = engine.llm.generate(
        [{"prompt_token_ids": prompt, **extra}], sampling, use_tqdm=False
    )
    return output


def test_salts_do_not_see_each_other(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(900)
    salted(served, prompt, cache_salt="one")
    served.drop_device_cache()

    assert salted(served, prompt, cache_salt="two").num_cached_tokens == 0
    assert salted(served, prompt).num_cached_tokens == 0
    served.drop_device_cache()
    assert salted(served, prompt, cache_salt="one").num_cached_tokens > 0


def test_limits_of_a_request_are_kept(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(900)
    salted(served, prompt, limits={"max_offload_tokens": 0})
    served.drop_device_cache()
    assert salted(served, prompt).num_cached_tokens == 0, "nothing was stored"
    served.drop_device_cache()
    assert salted(served, prompt, limits={"max_load_tokens": 0}).num_cached_tokens == 0
    served.drop_device_cache()
    assert salted(served, prompt).num_cached_tokens > 0


def test_new_weights_never_see_what_old_ones_stored(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(1500)
    [before] = served.ask(prompt)
    served.settle()
    served.llm.apply_model(halve_embeddings)
    assert served.llm.reset_prefix_cache(reset_connector=True)

    [after] = served.ask(prompt)
    served.drop_device_cache()
    [restored] = served.ask(prompt)

    assert after.cached_tokens == 0
    assert after.logprobs != before.logprobs
    assert restored.cached_tokens > 0, "what the new weights stored is found"
    assert restored.tokens == after.tokens
    assert not served.side.hook_faults


def test_what_new_weights_stored_is_not_found_after_a_restart(
    checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """The checkpoint is still the old one: its chunks are, too."""
    settings = {
        "host": {"capacity": "64MiB"},
        "tiers": [{"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}],
        "load": {"decide": "always"},
    }
    old, new = prompt_of(900, seed=1), prompt_of(900, seed=2)
    with serve(checkpoints.of("llama"), settings) as first:
        [expected] = first.ask(old)
        first.settle()
        first.llm.apply_model(halve_embeddings)
        assert first.llm.reset_prefix_cache(reset_connector=True)
        first.ask(old, new)
        first.settle()

    with serve(checkpoints.of("llama"), settings) as second:
        [found], [computed] = second.ask(old), second.ask(new)

    assert found.cached_tokens > 0
    assert found.tokens == expected.tokens
    assert computed.cached_tokens == 0


def test_a_reset_succeeds_while_blocks_are_held_by_stores(
    served: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = served.core
    worker: Any = served.worker
    monkeypatch.setattr(worker.copies, "submit", lambda jobs: None)  # noqa: ARG005 - stores hang
    served.ask(prompt_of(600))
    core.step()
    assert served.side.holds_blocks

    assert served.llm.reset_prefix_cache()
    assert not served.side.holds_blocks


def halve_embeddings(model: Any) -> None:
    """Weights that answer otherwise."""
    model.model.embed_tokens.weight.data.mul_(0.5)
    model.model.embed_tokens.weight.data[::2].neg_()
