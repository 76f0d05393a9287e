"""LFM2: settings beyond those of the tiny checkpoint, refusals, and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.engine.cache.specs import StateSpec
from kvstrata.engine.checkpoint import build_model, load_model
from kvstrata.engine.models.lfm2 import TINY, Config, GatedConv, layer_kinds
from kvstrata.engine.nn.cached import StateCache
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.engine.ranks import LocalRank, RankSettings
from kvstrata.engine.scheduling.step import SamplingParams, ScheduledSequence, StepPlan
from kvstrata.errors import ModelError

CUTS = [7, 70, 71, 72, 90]

VARIANTS: dict[str, dict[str, Any]] = {
    "older keys": {
        "layer_types": None,
        "full_attn_idxs": [1, 4],
        "num_hidden_layers": 6,
        "intermediate_size": 999,
        "block_ff_dim": 100,
        "tie_embedding": True,
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "rope_theta": 5_000.0,
    },
    "biases, a longer kernel, a head of its own": {
        "conv_bias": True,
        "conv_L_cache": 5,
        "tie_word_embeddings": False,
    },
    "a feed-forward width as it is": {"block_auto_adjust_ff_dim": False, "intermediate_size": 50},
    "a feed-forward width that is scaled up": {
        "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 6,
    },
    "nothing but attention": {"layer_types": None, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_the_scores_of_transformers(make_parity: Any, name: str) -> None:  # noqa: ANN401
    parity = make_parity("lfm2", **VARIANTS[name])
    prompts = [parity.prompt(length, seed=length) for length in (90, 33)]
    with parity.ranks() as ranks:
        parity.check(ranks, prompts, CUTS)


@pytest.mark.slow
def test_two_ranks_add_a_bias_once(make_parity: Any) -> None:  # noqa: ANN401
    parity = make_parity("lfm2", conv_bias=True)
    with parity.ranks(2) as ranks:
        parity.check(ranks, [parity.prompt(90)], CUTS)


def test_a_lost_state_is_noticed(make_parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    parity = make_parity("lfm2")
    load = StateCache.load
    monkeypatch.setattr(
        StateCache, "load", lambda *args: [torch.zeros_like(part) for part in load(*args)]
    )
    with parity.ranks() as ranks, pytest.raises(AssertionError, match="not close"):
        parity.check(ranks, [parity.prompt(90)], CUTS)


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({"intermediate_size": 12_288}, 8192),
        ({"block_ff_dim": 6656, "intermediate_size": 1}, 4608),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"intermediate_size": 100, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.5}, 99),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_feed_forward_widths(settings: dict[str, Any], width: int) -> None:
    assert Config(**settings).feed_forward_width == width


def test_older_checkpoints_say_where_attention_is() -> None:
    assert layer_kinds(Config(num_hidden_layers=3, full_attn_idxs=[1])) == [
        "conv",
        "full_attention",
        "conv",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "mamba"] * 4}, "layer_types has 'mamba'; accepted: conv, full"),
        ({"layer_types": ["conv"]}, "layer_types has 1 entries; num_hidden_layers is 8"),
        ({"conv_L_cache": "three"}, "conv_L_cache"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; accepted"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changes: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=message):
        build_model(TINY | changes, TensorParallel())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_key_value_heads": 1, "layer_types": ["full_attention"] * 8}, "num_key_value_heads"),
        ({"hidden_size": 63, "head_dim": 16}, "hidden_size"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes: Any, key: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=rf"{key} is \d+, which 2 ranks cannot share"):
        build_model(TINY | changes, TensorParallel(0, 2))


def test_bfloat16_stays_near_float32(make_parity: Any) -> None:  # noqa: ANN401
    parity = make_parity("lfm2")
    prompt = parity.prompt(97)
    expected = parity.expected(prompt)
    ranks = LocalRank(RankSettings(folder=parity.folder, dtype="bfloat16"))
    ranks.allocate(60)
    tables = tuple([1 + 8 * i + j for j in range(8)] for i in range(len(ranks.plan.layout.groups)))
    keep = SamplingParams(keep_logits=True)
    for start, stop in ((0, 50), (50, 51), (51, 97)):
        sequence = ScheduledSequence("0", start, prompt[start:stop], tables, keep)
        (result,) = ranks.execute(StepPlan([sequence]))
        error = torch.tensor(result.logits["0"]) - expected[stop - 1]
        assert error.abs().mean() < 0.1 * expected.abs().mean()
    ranks.close()


def test_states_have_the_dtype_of_the_model(make_parity: Any) -> None:  # noqa: ANN401
    model = load_model(make_parity("lfm2").folder, TensorParallel(), dtype="bfloat16")
    caches = [module.cache for module in model.modules() if isinstance(module, GatedConv)]
    assert len(caches) == 6
    for cache in caches:
        assert isinstance(cache.spec, StateSpec)
        (last_inputs,) = cache.spec.parts
        assert (last_inputs.shape, last_inputs.dtype) == ((64, 2), torch.bfloat16)
