"""Weights by which every token matters to the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def draw_weights(model: nn.Module) -> None:
    """Give a model weights that are random, and the same each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(drawn * 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(0.1 * drawn + float("norm" in name))
