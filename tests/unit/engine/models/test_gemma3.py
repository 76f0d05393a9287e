"""Gemma 3: kinds of layers, two ways to turn, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.engine.checkpoint import build_model
from kvstrata.engine.models.gemma3 import FULL, TINY, WINDOW, ScaledEmbedding, rope_of
from kvstrata.engine.nn.cached import PagedAttention
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.errors import ModelError

CUTS = [7, 48, 49, 50, 80, 97]

OLDER_KEYS = {
    "rope_parameters": None,
    "rope_theta": 20_000.0,
    "rope_local_base_freq": 300.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "layer_types": None,
    "sliding_window_pattern": 3,
}


@pytest.mark.parametrize(
    "changes",
    [
        OLDER_KEYS,
        {"sliding_window": 5},
        {"sliding_window": 100},
        {"attention_bias": True},
        {"query_pre_attn_scalar": 24},
        {"tie_word_embeddings": False},
        {"layer_types": [WINDOW] * 8},
        {"layer_types": [FULL] * 8},
    ],
    ids=", ".join,
)
def test_settings(make_parity: Any, changes: dict[str, Any]) -> None:  # noqa: ANN401
    parity = make_parity("gemma3", **changes)
    with parity.ranks() as ranks:
        parity.check(ranks, [parity.prompt(97), parity.prompt(60, seed=1)], CUTS)


def test_kinds_by_pattern() -> None:
    pattern = [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW]
    assert _windows(TINY | OLDER_KEYS) == [32 if kind == WINDOW else None for kind in pattern]


def test_positions_by_older_keys() -> None:
    full, window = rope_of(OLDER_KEYS, FULL), rope_of(OLDER_KEYS, WINDOW)
    assert (full.rope_theta, full.rope_type, full.factor) == (20_000.0, "linear", 4.0)
    assert (window.rope_theta, window.rope_type) == (300.0, "default")


def test_positions_without_keys() -> None:
    assert rope_of({}, FULL).rope_theta == 1_000_000.0
    assert rope_of({}, WINDOW).rope_theta == 10_000.0


def test_scale_of_embeddings_is_rounded_with_the_weights() -> None:
    embedding = ScaledEmbedding(1, 72).to(torch.bfloat16)
    embedding.weight.fill_(1.0)
    (found,) = embedding(torch.tensor([0])).unique().tolist()
    assert found == float(torch.tensor(72**0.5, dtype=torch.bfloat16)) != 72**0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; accepted: 'gelu_pyto"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; accepted: None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; accepted: None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"layer_types": ["mamba"] * 8}, "layer_types is 'mamba'; accepted: 'sliding_att"),
        ({"layer_types": [FULL]}, "layer_types has 1 entries; expected num_hidden_layers, 8"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has keys .*'rope_theta'"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_model(TINY | change, TensorParallel())


def _windows(config: dict[str, Any]) -> list[int | None]:
    model = build_model(config, TensorParallel())
    layers = [layer for layer in model.modules() if isinstance(layer, PagedAttention)]
    return [getattr(layer.spec, "window_tokens", None) for layer in layers]
