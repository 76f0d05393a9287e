"""What a chunk says about itself, and a chunk together with the memory for its bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.core.ids import key_group

if TYPE_CHECKING:
    from kvstrata.core.chunk_grid import ChunkGrid
    from kvstrata.core.ids import BlockHash, ChunkKey, GroupId
    from kvstrata.core.layout import GroupKind
    from kvstrata.core.spans import TokenSpan


@dataclass(frozen=True)
class Namespace:
    """Everything that a chunk's bytes depend on besides its tokens.

    Chunks of different namespaces never meet: the fingerprint is in every path, object name and
    header.
    """

    weights: str
    """A digest of the actual weights, not of the model's name."""
    geometry: str
    """`ChunkGeometry.fingerprint`: layout, dtype, parallel layout and chunk sizes."""
    page_encoding: str
    """`CanonicalKVCaches.page_encoding`, with what the engine's kernels add to it."""
    hashing: str
    """Algorithm and seed of the block hashes."""

    @cached_property
    def fingerprint(self) -> str:
        """One name for all of it, 40 hexadecimal digits."""
        facts = "\n".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return hashlib.sha256(b"kvstrata/namespace/1\n" + facts.encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the ranks that each hold a part of every chunk."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"rank {self.index} is not one of {self.count}")


class ChunkLabel(NamedTuple):
    """What a chunk holds: enough to check it, and to describe it to an operator."""

    key: ChunkKey
    kind: GroupKind
    block_tokens: int
    tokens: TokenSpan
    """For a recurrent state: it is taken at their end."""
    parent: BlockHash
    """The prefix hash where the chunk starts; empty at the start of a request."""
    payload_bytes: int
    """On one rank."""

    @property
    def group_id(self) -> GroupId:
        """The group that the chunk belongs to."""
        return key_group(self.key)


@dataclass(frozen=True, slots=True)
class ChunkBuffer:
    """A chunk with one rank's memory for its bytes.

    The parts together have room for the payload, which lies in them one after the other. Parts
    that start and end on 4 KiB pages (the host arena's do) can be moved without a copy.
    """

    label: ChunkLabel
    parts: tuple[memoryview, ...]

    def __post_init__(self) -> None:
        if self.room_bytes < self.label.payload_bytes:
            raise ValueError(
                f"room for {self.room_bytes} bytes is too small for {self.label.payload_bytes}"
            )

    @property
    def room_bytes(self) -> int:
        """Bytes in all parts."""
        return sum(part.nbytes for part in self.parts)

    def payload(self) -> list[memoryview]:
        """The parts, cut to the payload."""
        return self.front(self.label.payload_bytes)

    def front(self, num_bytes: int) -> list[memoryview]:
        """The parts, cut to their first `num_bytes` bytes."""
        views, left = [], num_bytes
        for part in self.parts:
            views.append(part[: min(left, part.nbytes)])
            left -= views[-1].nbytes
        return [view for view in views if view.nbytes]


def label_of(grid: ChunkGrid, group_id: GroupId, index: int) -> ChunkLabel:
    """The label of one chunk of a request."""
    chunks = grid.geometry.groups[group_id]
    tokens = chunks.tokens(index)
    return ChunkLabel(
        key=grid.key(group_id, index),
        kind=chunks.group.kind,
        block_tokens=chunks.group.block_tokens,
        tokens=tokens,
        parent=grid.hash_before(tokens.start),
        payload_bytes=chunks.chunk_bytes,
    )
