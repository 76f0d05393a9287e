"""Which architectures there are.

Each is one module with three names:

    Config   what it reads of config.json, a msgspec struct
    Model    built from (config, config.json as a dict, ranks); `model(batch)`, `model.logits(x)`
    TINY     the config.json of a tiny checkpoint, for `make-tiny`

and, where drawing weights from a normal distribution would not do, a function `draw`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec
    import torch

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import StepBatch

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "granite_hybrid": "GraniteMoeHybridForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Module name to the name that config.json gives."""


class CausalModel(Protocol):
    """What a runner calls."""

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens: (tokens, hidden)."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary."""
        ...


class ModelClass(Protocol):
    """How a model is built; weights are not yet set."""

    def __call__(
        self, config: msgspec.Struct, raw: Mapping[str, Any], ranks: TensorParallel
    ) -> torch.nn.Module:
        """Build this rank's part of the model."""
        ...


class Architecture(Protocol):
    """One module of this package."""

    Config: type[msgspec.Struct]
    Model: ModelClass
    TINY: dict[str, Any]


def architecture(name: str) -> Architecture:
    """The module of an architecture, by its short name.

    Raises:
        ModelError: there is no such architecture.
    """
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name!r} is not known; known: {', '.join(ARCHITECTURES)}")
    return cast("Architecture", importlib.import_module(f"kvstrata.engine.models.{name}"))


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The module that a config.json asks for.

    Raises:
        ModelError: it names no architecture, or none that is known.
    """
    named = config.get("architectures") or []
    for short, full in ARCHITECTURES.items():
        if full in named:
            return architecture(short)
    raise ModelError(
        f"config.json: architectures is {named!r}; accepted: {', '.join(ARCHITECTURES.values())}"
    )
