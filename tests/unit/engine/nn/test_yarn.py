"""YaRN gives the frequencies and the magnitude of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.engine.nn.rotary import Rotary, rope_settings

PLAIN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0}
SETTINGS = {
    "as published": PLAIN | {"original_max_position_embeddings": 4096},
    "original length not named": PLAIN,
    "other borders": PLAIN
    | {"original_max_position_embeddings": 2048, "beta_fast": 16.0, "beta_slow": 2.0},
    "borders between pairs": PLAIN | {"original_max_position_embeddings": 300, "truncate": False},
    "named magnitude": PLAIN | {"attention_factor": 1.7},
    "two strengths": PLAIN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "no scaling after all": PLAIN | {"factor": 1.0},
    "short": PLAIN | {"original_max_position_embeddings": 10},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_like_transformers(settings: dict[str, Any]) -> None:
    from transformers import LlamaConfig  # noqa: PLC0415 - slow to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    length = 163_840
    theirs = LlamaConfig(
        head_dim=64, max_position_embeddings=length, rope_parameters=dict(settings)
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = {"max_position_embeddings": length, "rope_parameters": settings}
    rotary = Rotary(64, rope_settings(ours))
    torch.testing.assert_close(rotary.frequencies, expected, rtol=1e-6, atol=0)
    cos, _ = rotary.angles(torch.tensor([0]))
    torch.testing.assert_close(cos, torch.full((1, 1, 64), magnitude))
