from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.spans import (
    BlockSpan,
    ChunkSpan,
    RowSpan,
    Span,
    TokenSpan,
    ceil_div,
    ceil_to,
    floor_to,
)

numbers = st.integers(0, 10_000)
units = st.integers(1, 3_000)


@given(numbers, units)
def test_rounding_stays_within_one_unit(value: int, unit: int) -> None:
    assert floor_to(value, unit) <= value < floor_to(value, unit) + unit
    assert ceil_to(value, unit) - unit < value <= ceil_to(value, unit)
    assert floor_to(value, unit) % unit == ceil_to(value, unit) % unit == 0
    assert ceil_div(value, unit) * unit == ceil_to(value, unit)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_units_touched_are_those_that_hold_a_token(start: int, length: int, unit: int) -> None:
    tokens = TokenSpan(start, start + length)

    expected = sorted({token // unit for token in range(start, start + length)})
    assert list(tokens.chunks(unit)) == expected
    assert list(tokens.blocks(unit)) == expected
    assert list(tokens.rows(unit)) == expected


def test_each_unit_has_its_own_type() -> None:
    tokens = TokenSpan(0, 32)

    assert tokens.blocks(16) == BlockSpan(0, 2)
    assert tokens.chunks(16) == ChunkSpan(0, 2)
    assert tokens.rows(16) == RowSpan(0, 2)
    assert Span(0, 2) != tokens.blocks(16)


@given(numbers, numbers, numbers, numbers)
def test_intersection_holds_what_both_hold(a: int, b: int, c: int, d: int) -> None:
    one, other = TokenSpan(min(a, b), max(a, b)), Span(min(c, d), max(c, d))

    shared = one.intersection(other)

    assert set(range(*_ends(shared))) == set(range(*_ends(one))) & set(range(*_ends(other)))
    assert one.touches(other) == bool(len(shared))
    assert type(shared) is TokenSpan


def test_span_behaves_like_a_half_open_range() -> None:
    span = TokenSpan(3, 6)

    assert list(span) == [3, 4, 5]
    assert len(span) == 3
    assert 3 in span
    assert 6 not in span
    assert str(span) == "[3, 6)"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_impossible_spans_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"TokenSpan needs 0 <= start <= stop"):
        TokenSpan(start, stop)


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop
