"""The models of the showcase: tiny ones, widened until recomputing a prompt costs something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDE: Final = {"hidden_size": 256, "intermediate_size": 768}

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _WIDE | {"num_hidden_layers": 8, "head_dim": 64},
    "mistral": _WIDE | {"num_hidden_layers": 8, "head_dim": 64, "sliding_window": 512},
    "gemma3": _WIDE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 512},
    "qwen3_next": _WIDE
    | {
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "lfm2": _WIDE,
    "granite_hybrid": {
        "hidden_size": 256,
        "intermediate_size": 128,
        "shared_intermediate_size": 256,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
    },
    "deepseek_v3": _WIDE
    | {
        "moe_intermediate_size": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}
"""By architecture: what its tiny checkpoint has otherwise."""


def check_models(names: Sequence[str]) -> None:
    """Refuse models that are not shown.

    Raises:
        ModelError: one of them is not.
    """
    for name in names:
        if name not in MODELS:
            raise ModelError(f"model {name!r} is not shown; shown: {', '.join(MODELS)}")
