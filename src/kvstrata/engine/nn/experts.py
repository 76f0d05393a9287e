"""Mixture of experts: each token goes through the few feed-forward layers that score highest.

A router gives scores, `choose_experts` turns them into weights and indices, `Experts` adds up what
the chosen experts say. How scores are made and ranked differs by family and stays with the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, silu

from kvstrata.engine.nn.parallel import ColumnLinear, RowLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.engine.nn.parallel import TensorParallel


class Choice(NamedTuple):
    """The experts that each token goes through."""

    weights: torch.Tensor
    """(tokens, chosen): how much each expert counts."""
    indices: torch.Tensor
    """(tokens, chosen): which experts."""


def choose_experts(
    scores: torch.Tensor, count: int, *, normalise: bool, ranking: torch.Tensor | None = None
) -> Choice:
    """Choose the highest experts of each token and weigh them by their scores.

    Args:
        scores: (tokens, experts), what weights are made of.
        count: experts per token.
        normalise: whether a token's weights are made to add up to one.
        ranking: (tokens, experts), what decides who is chosen, where that is not the scores.
    """
    indices = (scores if ranking is None else ranking).topk(count, -1).indices
    weights = scores.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Choice(weights, indices)


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), not yet summed over the ranks.

    Args:
        hidden: width of the model.
        intermediate: width inside, over all ranks.
        ranks: who shares it.
        activation: what the gate goes through.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        ranks: TensorParallel,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu,
    ) -> None:
        super().__init__()
        self.gate_proj = ColumnLinear(hidden, [intermediate], ranks)
        self.up_proj = ColumnLinear(hidden, [intermediate], ranks)
        self.down_proj = RowLinear(intermediate, hidden, ranks)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output: what the ranks have adds up to it."""
        gated: torch.Tensor = self._activation(self.gate_proj(x)) * self.up_proj(x)
        return linear(gated, self.down_proj.weight)


class Experts(nn.ModuleList):
    """All experts of a layer. Every rank has a slice of each.

    Args:
        count: how many there are.
        hidden: width of the model.
        intermediate: width inside one expert, over all ranks.
        ranks: who shares them.
        activation: what gates go through.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        intermediate: int,
        ranks: TensorParallel,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu,
    ) -> None:
        super().__init__(Expert(hidden, intermediate, ranks, activation) for _ in range(count))
        self._ranks = ranks

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        """Add up the weighed outputs of the chosen experts, equal on every rank.

        Args:
            x: (tokens, hidden).
            weights: (tokens, chosen).
            indices: (tokens, chosen).
        """
        total = torch.zeros_like(x)
        chosen = indices.flatten()
        places = chosen.argsort(stable=True).split(chosen.bincount(minlength=len(self)).tolist())
        for expert, its_places in zip(self, places, strict=True):
            if its_places.numel():
                tokens = its_places // indices.shape[1]
                said = expert(x[tokens]) * weights.flatten()[its_places, None]
                total.index_add_(0, tokens, said.to(total.dtype))
        return self._ranks.sum(total)
