"""Drawing the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from kvstrata.engine.scheduling.step import SamplingParams


_SEEDS: Final = 2**63


def draw_token(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """The next token; the same for equal scores, settings and position, on every rank."""
    if not sampling.temperature:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed((sampling.seed * 1_000_003 + position) % _SEEDS)
    chances = torch.softmax(logits / sampling.temperature, 0)
    return int(torch.multinomial(chances, 1, generator=generator))
