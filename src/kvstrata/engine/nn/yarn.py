"""YaRN: positions beyond what a model was trained on, by slowing down the slow pairs alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvstrata.engine.nn.rotary import RopeSettings


def yarn_frequencies(frequencies: torch.Tensor, settings: RopeSettings) -> torch.Tensor:
    """Slow down pairs by how often they turn within the original length.

    Pairs that turn more than `beta_fast` times keep their pace, those that turn less than
    `beta_slow` times are slowed down by the factor, and those between by degrees.
    """
    fast = _pair(settings.beta_fast, settings, frequencies)
    slow = _pair(settings.beta_slow, settings, frequencies)
    if settings.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * len(frequencies) - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    slowed = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / settings.factor)


def yarn_magnitude(settings: RopeSettings) -> float:
    """What turned values are multiplied with."""
    if settings.attention_factor is not None:
        return settings.attention_factor
    if settings.mscale and settings.mscale_all_dim:
        return stretch(settings.factor, settings.mscale) / stretch(
            settings.factor, settings.mscale_all_dim
        )
    return stretch(settings.factor)


def stretch(factor: float, strength: float = 1.0) -> float:
    """How much sharper attention gets when positions are slowed down by a factor."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _pair(turns: float, settings: RopeSettings, frequencies: torch.Tensor) -> float:
    """The pair, as a fraction, that turns this many times within the original length."""
    length = settings.original_max_position_embeddings
    steps = math.log(length / (turns * 2 * math.pi)) / math.log(settings.rope_theta)
    return len(frequencies) * steps
