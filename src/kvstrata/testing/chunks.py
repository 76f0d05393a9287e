"""Labelled chunks with random bytes, for tests of stores."""

from __future__ import annotations

import itertools
import mmap
import random
import time

from kvstrata.core.chunk_label import ChunkBuffer, ChunkLabel, Namespace
from kvstrata.core.ids import BlockHash, GroupId, chunk_key
from kvstrata.core.layout import GroupKind
from kvstrata.core.outcomes import Deadline
from kvstrata.core.spans import TokenSpan, ceil_to

PAGE_BYTES = 4096


def a_namespace(weights: str = "weights") -> Namespace:
    """A namespace; different weights, different namespace."""
    return Namespace(weights=weights, geometry="g", page_encoding="p", hashing="sha256")


def a_label(number: int, *, group: int = 0, payload_bytes: int = 10_000) -> ChunkLabel:
    """The label of chunk `number`; equal numbers, equal labels."""
    digest = random.Random(number).randbytes(32)  # noqa: S311 - a name, no secret
    parent = random.Random(-number).randbytes(32) if number else b""  # noqa: S311
    return ChunkLabel(
        key=chunk_key(BlockHash(digest), GroupId(group)),
        kind=GroupKind.FULL,
        block_tokens=16,
        tokens=TokenSpan(number * 64, number * 64 + 64),
        parent=BlockHash(parent),
        payload_bytes=payload_bytes,
    )


def filled(label: ChunkLabel, *, seed: int = 0, num_parts: int = 1) -> ChunkBuffer:
    """A buffer with the bytes that belong to a label; the seed makes other bytes."""
    buffer = empty(label, num_parts=num_parts)
    source = random.Random(f"{label.key.hex()}{seed}")  # noqa: S311
    for part in buffer.payload():
        part[:] = source.randbytes(part.nbytes)
    return buffer


def empty(label: ChunkLabel, *, num_parts: int = 1) -> ChunkBuffer:
    """A buffer of whole pages, in several parts, with zeros."""
    pages = max(num_parts, ceil_to(label.payload_bytes, PAGE_BYTES) // PAGE_BYTES)
    memory = memoryview(mmap.mmap(-1, pages * PAGE_BYTES))
    cuts = [pages * i // num_parts * PAGE_BYTES for i in range(num_parts + 1)]
    return ChunkBuffer(label, tuple(memory[a:b] for a, b in itertools.pairwise(cuts)))


def content(buffer: ChunkBuffer) -> bytes:
    """The payload as bytes."""
    return b"".join(buffer.payload())


def within(seconds: float) -> Deadline:
    """A deadline from now."""
    return Deadline(time.monotonic() + seconds)
