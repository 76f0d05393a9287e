from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.chunk_grid import ChunkGrid
from kvstrata.core.hashing import AdoptedHashes, ExtraKeys, MediaSpan, PrefixHasher, sha256
from kvstrata.core.lookups import LookupCodes
from kvstrata.core.spans import TokenSpan
from kvstrata.errors import LayoutError
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.request_ledger import RequestLedger
from kvstrata.planning.store_plan import choose_stores
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from kvstrata.core.ids import BlockHash


def hashes_of(tokens: list[int], block: int = 4, extra: ExtraKeys | None = None) -> list[BlockHash]:
    hasher = PrefixHasher(block, extra)
    hasher.extend(tokens)
    return list(hasher.hashes)


class CountingDigest:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, message: bytes) -> bytes:
        self.calls += 1
        return sha256(message)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 9), st.data())
def test_tokens_hash_the_same_however_they_arrive(
    tokens: list[int], block: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    hasher = PrefixHasher(block)
    for start, stop in pairwise([0, *cuts, len(tokens)]):
        hasher.extend(tokens[start:stop])

    assert list(hasher.hashes) == hashes_of(tokens, block)
    assert len(hasher.hashes) == len(tokens) // block
    assert hasher.num_tokens == len(tokens)


def test_a_hash_covers_its_whole_prefix() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])

    assert one[0] != other[0]
    assert one[1] != other[1]
    assert hashes_of([1, 2, 3, 4, 0, 0, 0, 0])[0] == one[0]


def test_block_sizes_do_not_mix() -> None:
    assert hashes_of([1, 2, 3, 4], block=4) != hashes_of([1, 2, 3, 4], block=2)[1:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ExtraKeys(), ExtraKeys(cache_salt="")),
        (ExtraKeys(cache_salt="a"), ExtraKeys(cache_salt="b")),
        (ExtraKeys(cache_salt="a"), ExtraKeys(lora="a")),
        (ExtraKeys(cache_salt="ab", lora="c"), ExtraKeys(cache_salt="a", lora="bc")),
    ],
)
def test_tenants_are_kept_apart_from_the_first_block_on(one: ExtraKeys, other: ExtraKeys) -> None:
    tokens = list(range(8))

    assert not set(hashes_of(tokens, extra=one)) & set(hashes_of(tokens, extra=other))


def test_media_change_the_blocks_they_touch_and_all_after() -> None:
    def with_media(identifier: str, start: int, stop: int) -> list[BlockHash]:
        media = (MediaSpan(identifier, TokenSpan(start, stop)),)
        return hashes_of([0] * 16, extra=ExtraKeys(media=media))

    plain, cat = hashes_of([0] * 16), with_media("cat", 5, 10)

    assert cat[0] == plain[0]
    assert all(a != b for a, b in zip(cat[1:], plain[1:], strict=True))
    assert cat[1:] != with_media("dog", 5, 10)[1:]
    assert cat[1] != with_media("cat", 6, 10)[1], "the same picture, one token later"
    assert cat == with_media("cat", 5, 10)


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from kvstrata import *;"
        "h = PrefixHasher(4, ExtraKeys(cache_salt='s', lora='l')); h.extend(range(40));"
        "print(h.hashes[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = hashes_of(list(range(40)), extra=ExtraKeys(cache_salt="s", lora="l"))
    assert run.stdout.strip() == here[-1].hex()


def test_hashes_never_change_between_releases_unnoticed() -> None:
    """Stored chunks are found by these bytes; a new value means a new format version."""
    (value,) = hashes_of([1, 2, 3, 4])
    assert value.hex() == "4063698e56421a377a0c4876ac5bdcc32b7d73bda97569554c52a579f86ffb55"


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "x"])
def test_bad_tokens_are_refused_and_nothing_is_appended(bad: object) -> None:
    hasher = PrefixHasher(2)
    with pytest.raises(ValueError, match="token ids must be integers from 0"):
        hasher.extend([1, 2, bad])  # type: ignore[list-item]
    assert hasher.num_tokens == 0


def test_bytes_are_token_ids_like_any_other_integers() -> None:
    assert hashes_of(list(bytes([1, 2, 3, 4]))) == hashes_of([1, 2, 3, 4])
    hasher = PrefixHasher(4)
    hasher.extend(bytes([1, 2, 3, 4]))
    assert list(hasher.hashes) == hashes_of([1, 2, 3, 4])


def test_hash_block_must_be_positive() -> None:
    with pytest.raises(LayoutError, match="hash_block_tokens is 0"):
        PrefixHasher(0)


@given(st.data())
def test_each_block_is_hashed_once_over_any_sequence_of_lookups_and_steps(
    data: st.DataObject,
) -> None:
    digest = CountingDigest()
    layout = a_layout(full_group(4), window_group(10, 8), recurrent_group(12), hash_block=4)
    hasher = PrefixHasher(4, digest=digest)
    grid = ChunkGrid(cut_into_chunks(layout, 8), hasher.hashes)
    ledger = RequestLedger(grid)
    seeded = digest.calls
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["tokens", "look up", "step", "preempt"]))
        if action == "tokens":
            hasher.extend(range(data.draw(st.integers(0, 30))))
        elif action == "look up":
            grid.lookup(lambda keys: LookupCodes(bytes(len(keys))))
        elif action == "step":
            ledger.advance(max(ledger.computed_tokens, hasher.num_tokens))
            ledger.begin(choose_stores(ledger).chunks)
        else:
            ledger.preempt()
        assert digest.calls - seeded == len(hasher.hashes)


def test_adopted_hashes_are_read_in_place_at_a_coarser_size() -> None:
    engine = [bytes([i]) for i in range(7)]
    hashes = AdoptedHashes(engine, engine_tokens=16, hash_block_tokens=48)

    assert list(hashes) == [b"\x02", b"\x05"]
    engine.extend([b"\x07", b"\x08"])
    assert list(hashes) == [b"\x02", b"\x05", b"\x08"]
    assert hashes[-1] == b"\x08"
    assert hashes[1::1] == [b"\x05", b"\x08"]
    with pytest.raises(IndexError):
        hashes[3]


def test_adopted_hashes_equal_our_own_at_the_coarse_size() -> None:
    layout = a_layout(full_group(48), hash_block=48)
    fine = hashes_of(list(range(96)), block=16)

    hashes = AdoptedHashes(fine, engine_tokens=16, hash_block_tokens=48)

    grid = ChunkGrid(cut_into_chunks(layout, 48), hashes)
    keys = grid.keys(cut_into_chunks(layout, 48).groups[0].group_id)
    assert [key[:-2] for key in keys] == [fine[2], fine[5]]


@pytest.mark.parametrize(("engine", "ours"), [(32, 48), (0, 48), (64, 16)])
def test_hashes_that_do_not_fit_are_refused(engine: int, ours: int) -> None:
    with pytest.raises(LayoutError, match=f"every {engine} tokens, which does not divide"):
        AdoptedHashes([], engine_tokens=engine, hash_block_tokens=ours)
