"""The Mamba 2 mixer: a short convolution, a selective scan, a gated norm.

Heads are split over the ranks. Groups of keys and queries are split with them where their number
allows it; else every rank has all of them and takes those that its heads read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from kvstrata.engine.cache.specs import StatePart, StateSpec
from kvstrata.engine.nn.cached import StateCache
from kvstrata.engine.nn.parallel import ColumnLinear, Cut, RowLinear, Sharded, Whole
from kvstrata.engine.nn.selective_scan import ScanInput, selective_scan
from kvstrata.engine.nn.short_conv import ShortConv

if TYPE_CHECKING:
    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import Run, StateRun, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """The sizes of a mixer, over all ranks, and what its arithmetic needs besides."""

    hidden: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    has_conv_bias: bool
    has_proj_bias: bool
    eps: float
    step_limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.head_dim


class GatedNorm(Sharded):
    """An RMS norm of gated values over a width that is split over the ranks.

    Args:
        width: values per vector, over all ranks.
        eps: added to the mean square.
        ranks: who shares it.
    """

    weight: nn.Parameter

    def __init__(self, width: int, eps: float, ranks: TensorParallel) -> None:
        super().__init__()
        self.add_part("weight", (width,), Cut(0, (width,)), ranks)
        self._width, self._eps, self._ranks = width, eps, ranks

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate, then normalise in float32; the result has the gate's dtype."""
        wide = x.float() * silu(gate.float())
        squares = self._ranks.sum(wide.square().sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / self._width + self._eps)
        return (self.weight * wide).to(gate.dtype)


class Mamba2(Sharded):
    """A mixer with its states.

    Args:
        shape: its sizes.
        ranks: who shares it.

    Raises:
        ModelError: the heads cannot be split evenly.
    """

    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, shape: MixerShape, ranks: TensorParallel) -> None:
        super().__init__()
        inner, heads = shape.inner, shape.num_heads
        self._shape = shape
        self._num_heads = ranks.share(heads, "mamba_n_heads")
        is_split = shape.num_groups % ranks.size == 0
        width = shape.num_groups * shape.state_size
        section = width if is_split else Whole(width)
        bias = shape.has_proj_bias
        self.in_proj = ColumnLinear(
            shape.hidden, [inner, inner, section, section, heads], ranks, bias=bias
        )
        self.conv1d = ShortConv(
            [inner, section, section],
            shape.kernel,
            ranks,
            bias=shape.has_conv_bias,
            activation=silu,
        )
        for name in ("A_log", "D", "dt_bias"):
            self.add_part(name, (heads,), Cut(0, (heads,)), ranks)
        self.norm = GatedNorm(inner, shape.eps, ranks)
        self.out_proj = RowLinear(inner, shape.hidden, ranks, bias=bias)
        self._groups = None if is_split else groups_of_rank(shape, ranks)
        self.cache = StateCache(self._state_spec())

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Mix (tokens, hidden), each sequence going on where it stopped."""
        inner, channels = self._num_heads * self._shape.head_dim, self.conv1d.weight.shape[0]
        gate, mixed, steps = self.in_proj(x).split((inner, channels, self._num_heads), -1)
        steps = softplus(steps.float() + self.dt_bias.float()).clamp(*self._shape.step_limits)
        outputs = [
            self._scan(mixed[run.tokens], steps[run.tokens], run, states)
            for run, states in zip(batch.runs, self.cache.runs(batch), strict=True)
        ]
        out: torch.Tensor = self.out_proj(self.norm(torch.cat(outputs), gate))
        return out

    def _scan(
        self, mixed: torch.Tensor, steps: torch.Tensor, run: Run, states: StateRun
    ) -> torch.Tensor:
        """Convolve and scan one run: (tokens, inner width of this rank)."""
        state, conv_state = self.cache.load(states)
        packed = (run.num_sequences, run.num_tokens)
        convolved, conv_state = self.conv1d(mixed.unflatten(0, packed), conv_state)
        tokens = self._scan_input(convolved.float(), steps.unflatten(0, packed))
        output, state = selective_scan(tokens, -self.A_log.float().exp(), state)
        self.cache.keep(states, [state, conv_state])
        output = output + tokens.values * self.D.float()[:, None]
        return output.flatten(2).flatten(0, 1)

    def _scan_input(self, convolved: torch.Tensor, steps: torch.Tensor) -> ScanInput:
        inner = self._num_heads * self._shape.head_dim
        values, shared = convolved[..., :inner], convolved[..., inner:]
        keys, queries = (
            part.unflatten(-1, (-1, self._shape.state_size)) for part in shared.chunk(2, -1)
        )
        if self._groups is not None:
            keys, queries = keys[:, :, self._groups], queries[:, :, self._groups]
        return ScanInput(values.unflatten(-1, (self._num_heads, -1)), steps, keys, queries)

    def _state_spec(self) -> StateSpec:
        shape = (self._num_heads, self._shape.head_dim, self._shape.state_size)
        return StateSpec(
            (
                StatePart(shape, torch.float32),
                StatePart(self.conv1d.state_shape, torch.get_default_dtype()),
            )
        )


def groups_of_rank(shape: MixerShape, ranks: TensorParallel) -> list[int]:
    """Which groups a rank's heads read: one if it is the same for all, else one for each head."""
    num_heads = shape.num_heads // ranks.size
    heads = range(ranks.rank * num_heads, (ranks.rank + 1) * num_heads)
    groups = [head * shape.num_groups // shape.num_heads for head in heads]
    return groups[:1] if len(set(groups)) == 1 else groups
