from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.chunk_label import ChunkLabel, Rank
from kvstrata.core.ids import BlockHash
from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import TokenSpan
from kvstrata.testing.chunks import a_label, a_namespace, filled
from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    BadChunk,
    check_header,
    check_payload,
    checksum,
    make_header,
    parse_header,
)

LABEL = a_label(3)
OWNER = (a_namespace(), Rank(1, 2))


def page() -> bytes:
    return make_header(LABEL, *OWNER, filled(LABEL).payload())


def test_a_header_says_what_was_written() -> None:
    header = parse_header(page())

    check_header(header, LABEL, *OWNER)
    check_payload(header, filled(LABEL, num_parts=3).payload())
    assert len(page()) == HEADER_BYTES
    assert header.kind is GroupKind.FULL


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_single_bit_of_a_header_can_flip_unnoticed(bit: int) -> None:
    raw = bytearray(page())
    raw[bit // 8] ^= 1 << bit % 8

    with pytest.raises(BadChunk):
        parse_header(bytes(raw))


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(BadChunk):
        parse_header(raw)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        (LABEL._replace(key=a_label(4).key), "key"),
        (LABEL._replace(kind=GroupKind.WINDOW), "kind"),
        (LABEL._replace(block_tokens=32), "block_tokens"),
        (LABEL._replace(tokens=TokenSpan(0, 64)), "first_token"),
        (LABEL._replace(tokens=TokenSpan(192, 300)), "last_token"),
        (LABEL._replace(parent=BlockHash(b"other")), "parent"),
        (LABEL._replace(payload_bytes=9), "payload_bytes"),
    ],
)
def test_every_fact_is_compared(label: ChunkLabel, name: str) -> None:
    with pytest.raises(BadChunk, match=f"^{name} is"):
        check_header(parse_header(page()), label, *OWNER)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ((a_namespace("other"), Rank(1, 2)), "namespace"),
        ((a_namespace(), Rank(0, 2)), "rank"),
        ((a_namespace(), Rank(1, 3)), "num_ranks"),
    ],
)
def test_the_owner_is_compared(owner: tuple[object, Rank], name: str) -> None:
    with pytest.raises(BadChunk, match=f"^{name} is"):
        check_header(parse_header(page()), LABEL, *owner)  # type: ignore[arg-type]


def test_another_payload_is_noticed() -> None:
    with pytest.raises(BadChunk, match="checksum"):
        check_payload(parse_header(page()), filled(LABEL, seed=1).payload())


def test_checksum_does_not_depend_on_the_parts() -> None:
    assert checksum(filled(LABEL).payload()) == checksum(filled(LABEL, num_parts=3).payload())
