"""Mixture of experts whose weights lie in one tensor each, and the router that chooses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear, silu

from kvstrata.engine.nn.parallel import Cut, Linear, Sharded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.engine.nn.parallel import TensorParallel


class PackedWeight(Sharded):
    """One weight of all experts: (experts, outputs, inputs).

    Args:
        shape: of the whole weight.
        cut: how it is split.
        ranks: who shares it.
    """

    weight: nn.Parameter

    def __init__(self, shape: Sequence[int], cut: Cut, ranks: TensorParallel) -> None:
        super().__init__()
        self.add_part("weight", shape, cut, ranks)


class Router(nn.Module):
    """Scores experts; its weight is called `layer.weight`."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.layer = Linear(hidden, count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to (tokens, experts), in float32."""
        scores: torch.Tensor = self.layer(x)
        return scores.float()


class PackedExperts(nn.Module):
    """Each token goes through the experts with the highest scores. Every rank has a slice of each.

    Args:
        hidden: width of the model.
        intermediate: width inside one expert, over all ranks.
        ranks: who shares them.
        count: how many experts there are.
        num_chosen: how many of them a token goes through.
    """

    def __init__(
        self, hidden: int, intermediate: int, ranks: TensorParallel, *, count: int, num_chosen: int
    ) -> None:
        super().__init__()
        self._ranks, self._num_chosen = ranks, num_chosen
        self.router = Router(hidden, count)
        self.input_linear = PackedWeight(
            (count, 2 * intermediate, hidden), Cut(1, (intermediate, intermediate)), ranks
        )
        self.output_linear = PackedWeight(
            (count, hidden, intermediate), Cut(2, (intermediate,)), ranks
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what the chosen experts say of (tokens, hidden), equal on every rank."""
        chosen = self.router(x).topk(self._num_chosen, -1)
        weights = chosen.values.softmax(-1).to(x.dtype).flatten()
        experts = chosen.indices.flatten()
        total = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            places = (experts == expert).nonzero()[:, 0]
            tokens = places // self._num_chosen
            total.index_add_(0, tokens, self._ask(expert, x[tokens]) * weights[places, None])
        return self._ranks.sum(total)

    def _ask(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of one expert's output."""
        gate, up = linear(x, self.input_linear.weight[expert]).chunk(2, -1)
        return linear(silu(gate) * up, self.output_linear.weight[expert])
