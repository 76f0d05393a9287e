from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_grid import ChunkGrid, GroupChunks
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import ChunkKey, GroupId, chunk_key, key_group, key_hash
from kvstrata.core.lookups import (
    ChunkLookup,
    LookupCodes,
    all_ready,
    has_pending,
    once_arrived,
    to_codes,
)
from kvstrata.core.spans import RowSpan, TokenSpan
from kvstrata.errors import LayoutError
from kvstrata.testing.builders import (
    a_geometry,
    a_grid,
    a_layout,
    full_group,
    recurrent_group,
    window_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.layout import KVGroup

G0, G1 = GroupId(0), GroupId(1)


def chunks_of(group: KVGroup, size: int, hash_block: int = 16) -> GroupChunks:
    return GroupChunks(G0, group, size, hash_block)


def test_keys_carry_their_hash_and_group() -> None:
    grid = a_grid(a_geometry(a_layout(full_group(16), full_group(16)), 32, 16), 100)

    first, second = grid.keys(G0)[0], grid.keys(G1)[1]

    assert key_hash(first) == key_hash(second), "both end at token 32"
    assert (key_group(first), key_group(second)) == (G0, G1)
    assert first == chunk_key(key_hash(first), G0)


def test_grid_grows_with_its_hashes() -> None:
    hasher = PrefixHasher(16)
    grid = ChunkGrid(a_geometry(a_layout(full_group(16)), 32), hasher.hashes)
    hasher.extend(range(70))
    early = list(grid.keys(G0))
    hasher.extend(range(60))

    assert len(early) == 2
    assert list(grid.keys(G0))[:2] == early
    assert len(grid.keys(G0)) == grid.num_chunks(G0) == 4
    assert grid.hashed_tokens == 128
    assert [grid.key(G0, i) for i in range(4)] == list(grid.keys(G0))


def test_a_key_does_not_depend_on_other_groups() -> None:
    alone = a_grid(a_geometry(a_layout(full_group(16)), 48), 200)
    mixed = a_grid(a_geometry(a_layout(full_group(16), recurrent_group(112)), 48, 112), 200)

    assert list(alone.keys(G0)) == list(mixed.keys(G0))


def test_look_up_asks_once_per_group() -> None:
    asked: list[int] = []

    def lookup(keys: Sequence[ChunkKey]) -> LookupCodes:
        asked.append(len(keys))
        return all_ready(len(keys))

    grid = a_grid(a_geometry(a_layout(full_group(16), recurrent_group(48)), 32, 48), 100)

    assert grid.lookup(lookup) == (b"\x01" * 3, b"\x01" * 2)
    assert asked == [3, 2]


@pytest.mark.parametrize(
    ("group", "size", "rows", "expected"),
    [
        (full_group(16), 32, TokenSpan(32, 64), RowSpan(2, 4)),
        (full_group(528, kernel=16, page_bytes=33 * 64), 176, TokenSpan(176, 352), RowSpan(11, 22)),
        (window_group(40, 64), 64, TokenSpan(70, 80), RowSpan(1, 2)),
        (recurrent_group(528), 528, TokenSpan(528, 1056), RowSpan(1, 2)),
        (recurrent_group(528, state_tokens=16), 16, TokenSpan(528, 544), RowSpan(1, 2)),
        (recurrent_group(528, state_tokens=16), 16, TokenSpan(512, 528), RowSpan(0, 1)),
    ],
)
def test_rows_are_the_kernel_blocks_to_copy(
    group: KVGroup, size: int, rows: TokenSpan, expected: RowSpan
) -> None:
    assert chunks_of(group, size).rows(rows) == expected


def test_chunk_bytes_follow_the_tokens_except_for_states() -> None:
    cut = chunks_of(full_group(528, kernel=16, page_bytes=33 * 64), 176)

    assert cut.chunk_bytes == 11 * 64
    assert chunks_of(full_group(16), 64).chunk_bytes == 4 * 1024
    assert chunks_of(recurrent_group(528, state_tokens=16), 16).chunk_bytes == 4096
    assert cut.tokens(2) == TokenSpan(352, 528)


@pytest.mark.parametrize(
    ("group", "size", "message"),
    [
        (full_group(16), 24, "chunk of 24 tokens is not a multiple of the hash block of 16"),
        (full_group(16), 8, "chunk of 8 tokens is not a multiple"),
        (full_group(48), 64, "neither holds whole blocks of 48 nor an even part"),
        (full_group(48), 16, "neither holds whole blocks of 48"),
        (full_group(96, kernel=32), 16, "cut at multiples of 32"),
        (recurrent_group(48), 96, "chunk of 96 tokens, but states are 48 apart"),
    ],
)
def test_chunks_that_do_not_fit_their_group_are_refused(
    group: KVGroup, size: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        chunks_of(group, size)


def test_geometry_fingerprint_covers_layout_and_sizes() -> None:
    layout = a_layout(full_group(16))

    assert a_geometry(layout, 32).fingerprint == a_geometry(layout, 32).fingerprint
    assert a_geometry(layout, 32).fingerprint != a_geometry(layout, 64).fingerprint
    other = a_geometry(a_layout(full_group(16), hash_block=8), 32)
    assert a_geometry(layout, 32).fingerprint != other.fingerprint


def test_look_ups_pack_into_bytes() -> None:
    codes = to_codes([ChunkLookup.READY, ChunkLookup.ARRIVING, ChunkLookup.UNKNOWN])

    assert has_pending(codes)
    assert once_arrived(codes) == all_ready(3)
    assert not has_pending(to_codes([ChunkLookup.ABSENT, ChunkLookup.FAILED]))
