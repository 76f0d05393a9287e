"""What one layer asks of the cache, on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.core.layout import GroupKind, Sharding
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of every token; with a window, of the last ones."""

    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None

    @property
    def kind(self) -> GroupKind:
        """Which rule a prefix hit follows."""
        return GroupKind.FULL if self.window_tokens is None else GroupKind.WINDOW

    @property
    def sharding(self) -> Sharding:
        """Every rank keeps its own heads."""
        return Sharding.SHARDED

    def row_shape(self, row_tokens: int) -> tuple[int, ...]:
        """Keys, then values, of one kernel block."""
        return (2, row_tokens, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One vector per token, from which every head's keys and values are made (MLA)."""

    width: int

    @property
    def kind(self) -> GroupKind:
        """Which rule a prefix hit follows."""
        return GroupKind.FULL

    @property
    def sharding(self) -> Sharding:
        """Every rank keeps the same vectors."""
        return Sharding.REPLICATED

    def row_shape(self, row_tokens: int) -> tuple[int, ...]:
        """The vectors of one kernel block."""
        return (row_tokens, self.width)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of this part in one state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size that stands for all tokens so far.

    Raises:
        LayoutError: a part would not lie at a multiple of its item size.
    """

    parts: tuple[StatePart, ...]
    """One after the other in a page; wider items first, so that all are aligned."""

    def __post_init__(self) -> None:
        offset = 0
        for part in self.parts:
            if offset % part.dtype.itemsize:
                raise LayoutError(f"state part {part} lies at byte {offset}: put wide items first")
            offset += part.num_bytes

    @property
    def kind(self) -> GroupKind:
        """Which rule a prefix hit follows."""
        return GroupKind.RECURRENT

    @property
    def sharding(self) -> Sharding:
        """Every rank keeps its own heads or channels."""
        return Sharding.SHARDED

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return sum(part.num_bytes for part in self.parts)


PagedSpec = AttentionSpec | LatentSpec
CacheSpec = PagedSpec | StateSpec
