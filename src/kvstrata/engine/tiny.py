"""Tiny random checkpoints for demos and tests.

Weights are drawn so that answers differ from token to token: with the tiny weights that models are
usually initialised with, every token gets the same score and a corrupt cache would go unnoticed.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvstrata.engine.checkpoint import build_model, wanted_weights
from kvstrata.engine.models.registry import architecture
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def make_tiny(name: str, folder: Path, *, seed: int = 0, **changes: object) -> None:
    """Write a tiny random checkpoint.

    Args:
        name: the architecture's short name.
        folder: where to; made if it is not there.
        seed: equal seeds give equal weights.
        changes: keys of config.json to change.

    Raises:
        ModelError: the architecture is not known, the folder holds a model, or it cannot be
            written to.
    """
    module = architecture(name)
    _check_unused(folder)
    config: dict[str, Any] = module.TINY | {"dtype": "float32"} | changes
    generator = torch.Generator().manual_seed(seed)
    draw = getattr(module, "draw", draw_weight)
    weights = {
        weight_name: draw(weight_name, tuple(wanted.parameter.shape), generator).contiguous()
        for weight_name, wanted in wanted_weights(build_model(config, TensorParallel()))
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be written to: {error}") from error


def _check_unused(folder: Path) -> None:
    if any((folder / name).exists() for name in ("config.json", "model.safetensors")):
        raise ModelError(f"{folder} holds a model already; expected a new or empty folder")


def draw_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One weight: matrices keep the size of what they multiply, norms lie around one."""
    noise = torch.randn(shape, generator=generator)
    if "embed" in name and len(shape) > 1:
        return noise
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    if name.endswith("bias"):
        return noise * 0.1
    return 1.0 + noise * 0.1
