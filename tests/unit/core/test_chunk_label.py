from __future__ import annotations

import pytest

from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank, label_of
from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import TokenSpan
from kvstrata.testing.builders import a_geometry, a_grid, a_layout, full_group, recurrent_group
from kvstrata.testing.chunks import a_label, a_namespace, empty


def test_a_label_says_what_a_chunk_of_a_request_holds() -> None:
    grid = a_grid(a_geometry(a_layout(full_group(16), recurrent_group(48)), 32, 48), 200)

    first, third = label_of(grid, GroupId(0), 0), label_of(grid, GroupId(0), 2)
    state = label_of(grid, GroupId(1), 1)

    assert first.parent == b""
    assert third.key == grid.key(GroupId(0), 2)
    assert third.tokens == TokenSpan(64, 96)
    assert third.parent == grid.key(GroupId(0), 1)[:-2], "the prefix that ends where it starts"
    assert (state.kind, state.payload_bytes) == (GroupKind.RECURRENT, 4096)


@pytest.mark.parametrize("field", ["weights", "geometry", "page_encoding", "hashing"])
def test_every_fact_makes_another_namespace(field: str) -> None:
    facts = {"weights": "w", "geometry": "g", "page_encoding": "p", "hashing": "h"}

    one, other = Namespace(**facts), Namespace(**facts | {field: "x"})

    assert one.fingerprint == Namespace(**facts).fingerprint
    assert one.fingerprint != other.fingerprint
    assert len(one.fingerprint) == 40


def test_facts_do_not_run_into_each_other() -> None:
    assert a_namespace("a\ngeometry=b").fingerprint != a_namespace("a").fingerprint


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 1), (0, 0)])
def test_impossible_ranks_are_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        Rank(index, count)


def test_a_buffer_needs_room_for_its_payload() -> None:
    label = a_label(1, payload_bytes=5000)
    small = memoryview(bytearray(4999))
    with pytest.raises(ValueError, match="room for 4999 bytes is too small for 5000"):
        ChunkBuffer(label, (small,))

    parts = empty(label, num_parts=2).payload()
    assert [part.nbytes for part in parts] == [4096, 904]
