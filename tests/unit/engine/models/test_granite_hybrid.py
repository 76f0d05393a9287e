"""Granite 4: settings beyond those of the tiny checkpoint, refusals, ranks, and bfloat16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvstrata.engine.cache.specs import StateSpec
from kvstrata.engine.checkpoint import build_model, load_model
from kvstrata.engine.models.granite_hybrid import TINY, Config, layer_kinds, mixer_shape
from kvstrata.engine.nn.cached import StateCache
from kvstrata.engine.nn.mamba2 import Mamba2, groups_of_rank
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.engine.ranks import LocalRank, RankSettings
from kvstrata.engine.scheduling.step import SamplingParams, ScheduledSequence, StepPlan
from kvstrata.errors import ModelError

CUTS = [7, 70, 71, 72, 90]

VARIANTS: dict[str, dict[str, Any]] = {
    "rotary positions, older keys, no experts": {
        "layer_types": None,
        "layers_block_type": ["mamba", "attention"] * 2,
        "num_hidden_layers": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_d_head": "auto",
        "position_embedding_type": "rope",
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 5_000.0,
        "normalization_function": "rmsnorm",
    },
    "nothing but attention": {
        "layer_types": ["attention"] * 3,
        "num_hidden_layers": 3,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "newer names of layers, several groups, a head of its own": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "mamba_n_groups": 4,
        "tie_word_embeddings": False,
    },
    "other biases, limited steps": {
        "attention_bias": True,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_d_conv": 2,
        "time_step_limit": [0.05, 0.5],
    },
}

RANK_VARIANTS: dict[str, dict[str, Any]] = {
    "groups are split": {"mamba_n_groups": 2, "num_local_experts": 0, "mamba_proj_bias": True},
    "heads of one rank read several groups": {
        "hidden_size": 48,
        "mamba_n_heads": 6,
        "mamba_n_groups": 3,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_the_scores_of_transformers(make_parity: Any, name: str) -> None:  # noqa: ANN401
    parity = make_parity("granite_hybrid", **VARIANTS[name])
    prompts = [parity.prompt(length, seed=length) for length in (90, 33)]
    with parity.ranks() as ranks:
        parity.check(ranks, prompts, CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_VARIANTS)
def test_two_ranks_share_groups(make_parity: Any, name: str) -> None:  # noqa: ANN401
    parity = make_parity("granite_hybrid", **RANK_VARIANTS[name])
    with parity.ranks(2) as ranks:
        parity.check(ranks, [parity.prompt(90)], CUTS)


@pytest.mark.parametrize("lost", [0, 1], ids=["memory", "last inputs"])
def test_a_lost_state_is_noticed(
    make_parity: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
) -> None:
    parity = make_parity("granite_hybrid")
    load = StateCache.load

    def load_but_one(*args: Any) -> list[torch.Tensor]:  # noqa: ANN401
        parts = load(*args)
        parts[lost].zero_()
        return parts

    monkeypatch.setattr(StateCache, "load", load_but_one)
    with parity.ranks() as ranks, pytest.raises(AssertionError, match="not close"):
        parity.check(ranks, [parity.prompt(90)], CUTS)


@pytest.mark.parametrize(
    ("num_groups", "rank", "size", "groups"),
    [
        (1, 0, 2, [0]),
        (1, 1, 2, [0]),
        (2, 1, 4, [0]),
        (2, 2, 4, [1]),
        (3, 0, 2, [0, 0, 0, 0, 1, 1]),
        (3, 1, 2, [1, 1, 2, 2, 2, 2]),
    ],
)
def test_groups_of_a_rank(num_groups: int, rank: int, size: int, groups: list[int]) -> None:
    config = Config(hidden_size=48, mamba_n_heads=12, mamba_n_groups=num_groups)
    assert groups_of_rank(mixer_shape(config), TensorParallel(rank, size)) == groups


def test_a_rank_has_its_heads_and_the_only_group() -> None:
    config = Config(**{key: TINY[key] for key in TINY if key in Config.__struct_fields__})
    mixer = Mamba2(mixer_shape(config), TensorParallel(1, 2))
    assert mixer.in_proj.weight.shape == (2 * 64 + 2 * 32 + 4, 64)
    assert mixer.conv1d.weight.shape == (64 + 2 * 32, 1, 4)
    assert mixer.conv1d.cuts["weight"].full_shape((128, 1, 4)) == (192, 1, 4)


def test_layers_are_mixers_where_nothing_is_said() -> None:
    assert layer_kinds(Config(num_hidden_layers=2)) == ["mamba", "mamba"]


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.1, {"__float__": "Infinity"}], (0.1, math.inf)),
    ],
)
def test_limits_of_steps(written: Any, limits: tuple[float, float]) -> None:  # noqa: ANN401
    assert mixer_shape(Config(time_step_limit=written)).step_limits == limits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: silu"),
        ({"normalization_function": "layernorm"}, "normalization_function is .*; accepted: rms"),
        ({"position_embedding_type": "alibi"}, "'alibi'; accepted: null, nope, rope"),
        ({"layer_types": ["conv"] * 8}, "layer_types is 'conv'; accepted: mamba, linear_attention"),
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries; num_hidden_layers is 8"),
        ({"mamba_d_head": 17}, "mamba_d_head is 17 .* which is 128"),
        ({"mamba_d_head": "large"}, "mamba_d_head"),
        ({"mamba_n_groups": 3}, "mamba_n_groups is 3; accepted: a divisor of mamba_n_heads"),
        ({"mamba_n_groups": 0}, "mamba_n_groups"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; accepted: 1 to num_local_experts"),
        ({"time_step_limit": [1.0]}, "time_step_limit is .*; accepted: two numbers"),
        ({"time_step_limit": [0.0, {"float": "1"}]}, "time_step_limit is .*; accepted: two"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changes: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=message):
        build_model(TINY | changes, TensorParallel())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mamba_n_heads": 1, "mamba_d_head": 128}, "mamba_n_heads"),
        ({"layer_types": ["attention"] * 8, "num_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(changes: Any, key: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=f"{key} is 1, which 2 ranks cannot share"):
        build_model(TINY | changes, TensorParallel(0, 2))


def test_bfloat16_stays_near_float32(make_parity: Any) -> None:  # noqa: ANN401
    parity = make_parity("granite_hybrid", num_local_experts=0)  # choices of experts may flip
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
        assert error.abs().mean() < 0.2 * expected.abs().mean()
    ranks.close()


def test_memory_is_float32_whatever_the_model_is(make_parity: Any) -> None:  # noqa: ANN401
    folder = make_parity("granite_hybrid").folder
    model = load_model(folder, TensorParallel(), dtype="bfloat16")
    caches = [module.cache for module in model.modules() if isinstance(module, Mamba2)]
    assert len(caches) == 6
    for cache in caches:
        assert isinstance(cache.spec, StateSpec)
        memory, last_inputs = cache.spec.parts
        assert (memory.shape, memory.dtype) == ((8, 16, 32), torch.float32)
        assert (last_inputs.shape, last_inputs.dtype) == ((192, 3), torch.bfloat16)
