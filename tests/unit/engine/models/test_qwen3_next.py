"""Qwen3-Next: settings beyond those of the tiny checkpoint, refusals, and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.engine.cache.specs import StateSpec
from kvstrata.engine.checkpoint import build_model, load_model
from kvstrata.engine.models.qwen3_next import TINY, Config, GatedDeltaNet
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.engine.ranks import LocalRank, RankSettings
from kvstrata.engine.scheduling.step import SamplingParams, ScheduledSequence, StepPlan
from kvstrata.errors import ModelError

VARIANTS: dict[str, dict[str, Any]] = {
    "older keys": {
        "layer_types": None,
        "full_attention_interval": 2,
        "num_hidden_layers": 4,
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
    "positions stretched by YaRN": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "some layers without experts": {
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": False,
    },
    "no experts, as many key heads as value heads": {
        "num_experts": 0,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
    },
    "biases and a tied head": {"attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_the_scores_of_transformers(make_parity: Any, name: str) -> None:  # noqa: ANN401
    parity = make_parity("qwen3_next", **VARIANTS[name])
    prompts = [parity.prompt(length, seed=length) for length in (90, 33)]
    with parity.ranks() as ranks:
        parity.check(ranks, prompts, [7, 70, 71, 72, 90])


def test_real_checkpoints_say_the_interval_of_full_attention() -> None:
    config = Config(num_hidden_layers=8, full_attention_interval=4)
    full = [i for i in range(8) if config.layer_kind(i) == "full_attention"]
    assert full == [3, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ({"layer_types": ["full_attention"]}, r"layer_types is .*num_hidden_layers \(8\) times"),
        (
            {"layer_types": ["sliding_attention"] * 8},
            "accepted: linear_attention or full_attention",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; accepted: a multiple of"),
        ({"num_experts": "many"}, "num_experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; accepted"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changes: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=message):
        build_model(TINY | changes, TensorParallel())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"linear_num_key_heads": 1}, "linear_num_key_heads"),
        ({"layer_types": ["full_attention"] * 8, "num_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(changes: Any, key: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelError, match=f"{key} is 1, which 2 ranks cannot share"):
        build_model(TINY | changes, TensorParallel(0, 2))


def test_bfloat16_stays_near_float32(make_parity: Any) -> None:  # noqa: ANN401
    parity = make_parity("qwen3_next")
    prompt = parity.prompt(97)
    expected = parity.expected(prompt)
    ranks = LocalRank(RankSettings(folder=parity.folder, dtype="bfloat16"))
    ranks.allocate(40)
    tables = tuple([1 + 4 * i + j for j in range(4)] for i in range(len(ranks.plan.layout.groups)))
    keep = SamplingParams(keep_logits=True)
    for start, stop in ((0, 50), (50, 51), (51, 97)):
        sequence = ScheduledSequence("0", start, prompt[start:stop], tables, keep)
        (result,) = ranks.execute(StepPlan([sequence]))
        error = torch.tensor(result.logits["0"]) - expected[stop - 1]
        assert error.abs().mean() < 0.2 * expected.abs().mean()
    ranks.close()


def test_memory_is_float32_whatever_the_model_is(make_parity: Any) -> None:  # noqa: ANN401
    folder = make_parity("qwen3_next").folder
    model = load_model(folder, TensorParallel(), dtype="bfloat16")
    caches = [m.states for m in model.modules() if isinstance(m, GatedDeltaNet)]
    assert len(caches) == 6
    for cache in caches:
        assert isinstance(cache.spec, StateSpec)
        memory, last_inputs = cache.spec.parts
        assert memory.dtype == torch.float32
        assert last_inputs.dtype == torch.bfloat16
