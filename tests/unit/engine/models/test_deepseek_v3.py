"""DeepSeek V3: latent attention, routing, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from kvstrata.core.layout import Sharding
from kvstrata.engine.cache.specs import LatentSpec
from kvstrata.engine.checkpoint import build_model
from kvstrata.engine.models.deepseek_v3 import TINY, Config, Router
from kvstrata.engine.nn.cached import LatentCache
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.errors import ModelError

CUTS = [7, 48, 49, 50, 80, 97]
YARN = TINY["rope_parameters"]

SETTINGS = {
    "whole queries": {"q_lora_rank": None},
    "pairs half a width apart": {"rope_interleave": False},
    "no scaling of positions": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "longer turned values": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "no second scale": {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "older keys for positions": {
        "rope_parameters": None,
        "rope_theta": 5_000.0,
        "rope_scaling": {k: v for k, v in YARN.items() if k not in {"rope_theta", "rope_type"}}
        | {"type": "yarn"},
    },
    "biases": {"attention_bias": True},
    "wide values": {"v_head_dim": 40},
    "weights as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "all groups": {"topk_group": 4},
    "two shared experts": {"n_shared_experts": 2},
    "experts everywhere": {"first_k_dense_replace": 0},
    "experts nowhere": {"first_k_dense_replace": 5},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_settings(make_parity: Any, changes: dict[str, Any]) -> None:  # noqa: ANN401
    parity = make_parity("deepseek_v3", **changes)
    with parity.ranks() as ranks:
        parity.check(ranks, [parity.prompt(97), parity.prompt(60, seed=1)], CUTS)


def test_every_rank_keeps_the_whole_cache() -> None:
    model = build_model(TINY, TensorParallel(size=2))
    specs = [layer.spec for layer in model.modules() if isinstance(layer, LatentCache)]
    assert specs == [LatentSpec(40)] * TINY["num_hidden_layers"]
    assert specs[0].sharding is Sharding.REPLICATED


def test_best_experts_of_best_groups_alone() -> None:
    router = _router(n_routed_experts=6, n_group=3, topk_group=1, num_experts_per_tok=2)
    logits = torch.tensor([[5.0, -9.0, 2.0, 1.9, 1.0, 1.0]])
    router.weight.copy_(logits.T)
    router.e_score_correction_bias.zero_()
    weights, indices = router(torch.ones(1, 1))
    assert indices.tolist() == [[2, 3]], "expert 0 is the best, but its group is not"
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))


def test_bias_chooses_but_does_not_weigh() -> None:
    router = _router(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)
    router.weight.zero_()
    router.e_score_correction_bias.copy_(torch.tensor([0.0, 3.0, 0.0, 1.0]))
    weights, indices = router(torch.ones(1, 1))
    assert indices.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))


def test_router_keeps_its_bias_in_float32() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = _router()
    finally:
        torch.set_default_dtype(torch.float32)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; accepted: 4, None"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; accepted: 1"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: 'noaux_tc'"),
        ({"n_group": 3}, "n_group is 3; expected groups"),
        ({"n_group": 16}, "n_group is 16; expected groups of two or more"),
        ({"n_group": None}, "n_group"),
        ({"topk_group": 5}, "topk_group is 5; expected at most n_group, 4"),
        ({"num_experts_per_tok": 9}, "room for num_experts_per_tok, 9"),
    ],
)
def test_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_model(TINY | change, TensorParallel())


def test_heads_that_ranks_cannot_share() -> None:
    with pytest.raises(ModelError, match="num_attention_heads is 4, which 3 ranks"):
        build_model(TINY, TensorParallel(size=3))


def _router(**changes: int) -> Router:
    sizes = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 1,
    }
    return Router(msgspec.convert(sizes | changes, Config))
