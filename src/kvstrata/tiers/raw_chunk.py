"""A chunk as one run of raw bytes, for media that keep it as one value or one object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    BadChunk,
    check_header,
    check_payload,
    make_header,
    parse_header,
)

if TYPE_CHECKING:
    from kvstrata.core.chunk_label import ChunkBuffer, ChunkLabel, Namespace, Rank


def raw_bytes(label: ChunkLabel) -> int:
    """How many bytes a chunk takes, header page included."""
    return HEADER_BYTES + label.payload_bytes


def raw_parts(buffer: ChunkBuffer, namespace: Namespace, rank: Rank) -> list[bytes | memoryview]:
    """The header page and the payload's views, in the order they are written. Copies nothing."""
    payload = buffer.payload()
    return [make_header(buffer.label, namespace, rank, payload), *payload]


def fill(buffer: ChunkBuffer, raw: memoryview, namespace: Namespace, rank: Rank) -> None:
    """Copy a chunk's payload into its buffer and verify it there.

    The bytes are checked where they will be used, so the copy is covered too. After an error
    the buffer's content is undefined.

    Raises:
        BadChunk: these bytes are not the chunk that the buffer is labelled for.
    """
    check_size(raw.nbytes, buffer.label)
    header = parse_header(raw[:HEADER_BYTES])
    check_header(header, buffer.label, namespace, rank)
    payload, offset = buffer.payload(), HEADER_BYTES
    for part in payload:
        part[:] = raw[offset : offset + part.nbytes]
        offset += part.nbytes
    check_payload(header, payload)


def check_size(found_bytes: int, label: ChunkLabel) -> None:
    """Compare a size with what the label says.

    Raises:
        BadChunk: they differ.
    """
    if found_bytes != raw_bytes(label):
        raise BadChunk(f"{found_bytes} bytes instead of {raw_bytes(label)}")
