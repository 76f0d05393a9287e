"""Norms and feed-forward layers that several architectures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from kvstrata.engine.nn.parallel import ColumnLinear, RowLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.engine.nn.parallel import TensorParallel


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32, then scales.

    Args:
        width: values per vector.
        eps: added to the mean square.
        offset: added to the weight; 1.0 in families whose weights are kept around zero.
    """

    def __init__(self, width: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self._eps = eps
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        wide = rms_norm(x.float(), x.shape[-1:], eps=self._eps)
        if self._offset:
            return wide.mul_(self._offset + self.weight.float()).to(x.dtype)
        return wide.to(x.dtype).mul_(self.weight)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), split over the ranks.

    Args:
        hidden: width of the model.
        intermediate: width inside.
        ranks: who shares it.
        activation: what the gate goes through.
        bias: whether the linear layers have one.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        ranks: TensorParallel,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_proj = ColumnLinear(hidden, [intermediate], ranks, bias=bias)
        self.up_proj = ColumnLinear(hidden, [intermediate], ranks, bias=bias)
        self.down_proj = RowLinear(intermediate, hidden, ranks, bias=bias)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, equal on every rank."""
        gated = self._activation(self.gate_proj(x)).mul_(self.up_proj(x))
        down: torch.Tensor = self.down_proj(gated)
        return down
