"""Tables for the kernel say of every row where it is, as a loop over the rows would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.tiers.room import Extent
from kvstrata.transfers.copy_queue import ChunkCopy
from kvstrata.transfers.row_units import page_table, row_units

ROW_BYTES = 24


@st.composite
def copies(draw: st.DrawFn) -> ChunkCopy:
    rows = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
    first_row, behind = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    pages = st.builds(Extent, st.integers(0, 10**9), st.integers(1, 4))
    extents = draw(st.lists(pages, min_size=1, max_size=3))
    num_bytes = ROW_BYTES * (first_row + len(rows) + behind)
    return ChunkCopy(
        ChunkKey(b"key"), GroupId(0), tuple(extents), num_bytes, tuple(rows), first_row
    )


@given(st.lists(copies(), min_size=1, max_size=6), st.data())
def test_units_are_the_rows_in_their_order(chunks: list[ChunkCopy], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, 2**40)) for _ in chunks]
    expected = [
        [row, copy.first_row + place, copy.payload_bytes // ROW_BYTES, start]
        for copy, start in zip(chunks, starts, strict=True)
        for place, row in enumerate(copy.rows)
    ]

    assert row_units(chunks, starts, ROW_BYTES).T.tolist() == expected


@given(st.lists(copies(), min_size=1, max_size=6))
def test_a_chunks_pages_begin_where_the_table_says(chunks: list[ChunkCopy]) -> None:
    parts, starts = page_table(chunks)
    table = [int(page) for part in parts for page in part]
    ends = [*starts[1:], len(table)]

    for copy, start, end in zip(chunks, starts, ends, strict=True):
        pages = [e.first_page + n for e in copy.extents for n in range(e.num_pages)]
        assert table[start:end] == pages


@pytest.mark.parametrize(
    ("num_bytes", "rows", "first_row"),
    [(ROW_BYTES - 1, (1,), 0), (ROW_BYTES, (1, 2), 0), (2 * ROW_BYTES, (1, 2), 1)],
)
def test_a_payload_that_cannot_have_the_rows_is_refused(
    num_bytes: int, rows: tuple[int, ...], first_row: int
) -> None:
    copy = ChunkCopy(ChunkKey(b"key"), GroupId(0), (Extent(0, 1),), num_bytes, rows, first_row)

    with pytest.raises(ValueError, match=f"payload of {num_bytes} bytes"):
        row_units([copy], [0], ROW_BYTES)
