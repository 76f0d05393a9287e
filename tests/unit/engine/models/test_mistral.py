"""Mistral: the window, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.engine.checkpoint import build_model
from kvstrata.engine.models.mistral import TINY
from kvstrata.engine.nn.cached import PagedAttention
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.errors import ModelError

CUTS = [7, 48, 49, 50, 80, 97]


@pytest.mark.parametrize("window", [1, 5, 17, 96, None])
def test_windows_of_any_length(make_parity: Any, window: int | None) -> None:  # noqa: ANN401
    parity = make_parity("mistral", sliding_window=window)
    with parity.ranks() as ranks:
        parity.check(ranks, [parity.prompt(97), parity.prompt(60, seed=1)], CUTS)


def test_every_layer_has_the_window() -> None:
    assert _windows(TINY) == {48}
    assert _windows(TINY | {"sliding_window": None}) == {None}
    without_key = {key: value for key, value in TINY.items() if key != "sliding_window"}
    assert _windows(without_key) == {4096}


def test_older_keys_for_positions(make_parity: Any) -> None:  # noqa: ANN401
    parity = make_parity("mistral", rope_parameters=None, rope_theta=500.0)
    with parity.ranks() as ranks:
        parity.check(ranks, [parity.prompt(97)], CUTS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is 'full_attention'; accepted"),
    ],
)
def test_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_model(TINY | change, TensorParallel())


def test_heads_that_ranks_cannot_share() -> None:
    with pytest.raises(ModelError, match="num_key_value_heads is 2, which 4 ranks"):
        build_model(TINY, TensorParallel(size=4))


def _windows(config: dict[str, Any]) -> set[int | None]:
    model = build_model(config, TensorParallel())
    layers = [layer for layer in model.modules() if isinstance(layer, PagedAttention)]
    return {getattr(layer.spec, "window_tokens", None) for layer in layers}
