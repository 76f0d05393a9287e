"""Half-open ranges, and all rounding between tokens, blocks and chunks.

Plans are rounded here and nowhere else: one that is off by a token is a wrong answer, so the
arithmetic has one home and one set of tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator


def whole_units(value: int, unit: int) -> int:
    """How many whole units `value` holds; for a position, the unit it lies in."""
    return value // unit


def floor_to(value: int, unit: int) -> int:
    """The largest multiple of `unit` that is at most `value`."""
    return value - value % unit


def ceil_to(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def ceil_div(value: int, unit: int) -> int:
    """How many units it takes to hold `value`."""
    return -(-value // unit)


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of non-negative integers."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"{type(self).__name__} needs 0 <= start <= stop, got [{self.start}, {self.stop})"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def touches(self, other: Span) -> bool:
        """Whether the two ranges share at least one element."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def intersection(self, other: Span) -> Self:
        """What the two ranges share; empty, at this range's edge, when they share nothing."""
        start = min(max(self.start, other.start), self.stop)
        return type(self)(start, max(start, min(self.stop, other.stop)))


class BlockSpan(Span):
    """Positions in one request's block table of one group."""

    __slots__ = ()


class ChunkSpan(Span):
    """Indexes of consecutive chunks of one group."""

    __slots__ = ()


class RowSpan(Span):
    """Consecutive kernel blocks of one group, counted from the start of a request."""

    __slots__ = ()


class TokenSpan(Span):
    """Positions of tokens in a request."""

    __slots__ = ()

    def blocks(self, block_tokens: int) -> BlockSpan:
        """The blocks that hold at least one of these tokens."""
        return BlockSpan(*self._units_touched(block_tokens))

    def chunks(self, chunk_tokens: int) -> ChunkSpan:
        """The chunks that hold at least one of these tokens."""
        return ChunkSpan(*self._units_touched(chunk_tokens))

    def rows(self, row_tokens: int) -> RowSpan:
        """The kernel blocks that hold at least one of these tokens."""
        return RowSpan(*self._units_touched(row_tokens))

    def _units_touched(self, unit: int) -> tuple[int, int]:
        first = whole_units(self.start, unit)
        return first, first if self.start == self.stop else ceil_div(self.stop, unit)
