"""Mistral: a Llama whose layers look at a window of the last tokens, or at all of them."""

from __future__ import annotations

from typing import Any, Final

from kvstrata.engine.models import llama
from kvstrata.engine.models.settings import accept

TINY: Final[dict[str, Any]] = llama.TINY | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "sliding_window": 48,
}


class Config(llama.Config, frozen=True, kw_only=True):
    """What is read of a config.json, on top of what Llama reads."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096
    hidden_act: str = "silu"
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        accept("hidden_act", self.hidden_act, ["silu"])
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        for layer_type in self.layer_types or ():
            accept("an entry of layer_types", layer_type, [kind])


class Model(llama.Model):
    """A Mistral with its head: Llama's parts; the window comes with the config."""
