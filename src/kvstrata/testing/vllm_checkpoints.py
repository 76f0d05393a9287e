"""Tiny checkpoints that vLLM's CPU kernels run, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""True of each, if it does not say otherwise."""


class Tiny(NamedTuple):
    """A model's architecture, and what is not usual in it."""

    arch: str
    changes: Mapping[str, Any]


_DELTA_NET: Final = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "dtype": "bfloat16",
}
MODELS: Final[Mapping[str, Tiny]] = {
    "llama": Tiny("llama", {"head_dim": 64, "intermediate_size": 256}),
    "mistral": Tiny("mistral", {"head_dim": 64, "intermediate_size": 256, "sliding_window": 200}),
    "gemma3": Tiny("gemma3", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "lfm2": Tiny(
        "lfm2",
        {
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_ff_dim": 256,
            "intermediate_size": 256,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": Tiny("qwen3_next", _DELTA_NET | {"head_dim": 64, "linear_num_value_heads": 4}),
    # Blocks are as large as states, so that these have few tokens.
    "qwen3_next_small": Tiny(
        "qwen3_next",
        _DELTA_NET | {"head_dim": 128, "num_key_value_heads": 4, "linear_num_value_heads": 2},
    ),
}
"""The table. Gated delta nets have to be bfloat16, the others are float32."""


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> None:
    """Write one of the table's, with weights that matter."""
    from kvstrata.engine.tiny import make_tiny  # noqa: PLC0415 - loads torch

    model = MODELS[name]
    make_tiny(model.arch, folder, seed=seed, **{**COMMON, **model.changes})
