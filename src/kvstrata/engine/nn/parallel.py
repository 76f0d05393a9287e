"""Tensor parallelism: every rank has a slice of the weights, and sums meet where they must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among those that share the model."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """This rank's part of something that is split evenly.

        Raises:
            ModelError: it cannot be split evenly.
        """
        if total % self.size:
            raise ModelError(f"{what} is {total}, which {self.size} ranks cannot share evenly")
        return total // self.size

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank. Waits for them."""
        if self.size > 1:
            dist.all_reduce(partial)
        return partial


class Whole(int):
    """The size of a section that is not split: every rank has all of it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """How a rank's weight is taken out of the whole one.

    The whole weight is made of `sections` along `axis`; of each, every rank takes an even part, or
    all if its size is a `Whole`.
    """

    axis: int
    sections: tuple[int, ...]

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The whole weight's shape, given that of a rank's part."""
        shape = list(local)
        shape[self.axis] = sum(self.sections)
        return tuple(shape)

    def take(self, whole: torch.Tensor, ranks: TensorParallel) -> torch.Tensor:
        """This rank's part of the whole weight."""
        sections = zip(self.sections, whole.split(self.sections, self.axis), strict=True)
        parts = [
            section if isinstance(size, Whole) else section.chunk(ranks.size, self.axis)[ranks.rank]
            for size, section in sections
        ]
        return torch.cat(parts, self.axis)


class Sharded(nn.Module):
    """A module that holds parts of weights: `cuts` says which, by parameter name."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, Cut] = {}

    def add_part(self, name: str, shape: Sequence[int], cut: Cut, ranks: TensorParallel) -> None:
        """Add a parameter: this rank's part of a weight of this whole shape.

        Raises:
            ModelError: the weight cannot be split evenly.
        """
        local = list(shape)
        local[cut.axis] = sum(
            size if isinstance(size, Whole) else ranks.share(size, f"size of {name}")
            for size in cut.sections
        )
        self.cuts[name] = cut
        self.register_parameter(name, nn.Parameter(torch.empty(local), requires_grad=False))


class ColumnLinear(Sharded):
    """A linear layer whose outputs are split over the ranks.

    Args:
        in_features: inputs, whole on every rank.
        sections: outputs; each section is split by itself.
        ranks: who shares it.
        bias: whether there is one.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        sections: Sequence[int],
        ranks: TensorParallel,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        cut = Cut(0, tuple(sections))
        self.add_part("weight", (sum(sections), in_features), cut, ranks)
        self.bias: nn.Parameter | None
        if bias:
            self.add_part("bias", (sum(sections),), cut, ranks)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        return linear(x, self.weight, self.bias)


class RowLinear(Sharded):
    """A linear layer whose inputs are split over the ranks; its outputs are summed.

    Args:
        in_features: inputs, over all ranks.
        out_features: outputs, whole on every rank.
        ranks: who shares it.
        bias: whether there is one, added once.
    """

    weight: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, ranks: TensorParallel, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.add_part("weight", (out_features, in_features), Cut(1, (in_features,)), ranks)
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs, equal on every rank."""
        partial = self._ranks.sum(linear(x, self.weight))
        return partial if self.bias is None else partial + self.bias


class Linear(nn.Module):
    """A linear layer that every rank has as a whole.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: whether there is one.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of vectors that every rank has as a whole.

    Args:
        num_entries: rows of the table.
        width: length of a vector.
    """

    def __init__(self, num_entries: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_entries, width), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The vectors of these tokens."""
        return self.weight[token_ids]
