"""A decoder with a head that scores the next token: the outermost part of every model here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear

from kvstrata.engine.nn.parallel import Embedding, Linear

if TYPE_CHECKING:
    from kvstrata.engine.nn.step import StepBatch


class Decoder(nn.Module):
    """Embedding, layers, last norm: (step) -> (tokens, hidden)."""

    embed_tokens: Embedding


class CausalLM(nn.Module):
    """A decoder and its head.

    Args:
        model: the decoder.
        is_tied: whether the embedding is the head too.
    """

    def __init__(self, model: Decoder, *, is_tied: bool) -> None:
        super().__init__()
        vocab_size, hidden = model.embed_tokens.weight.shape
        self.model = model
        self.lm_head = None if is_tied else Linear(hidden, vocab_size)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        hidden: torch.Tensor = self.model(batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight)
