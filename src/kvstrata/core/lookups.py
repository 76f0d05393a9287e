"""What is known about a chunk, as one byte each.

A prefix of 128K tokens means thousands of look-ups for one decision. They travel as `bytes`,
one value per chunk of a group in chunk order, so that "the first that is not ready" or "the last
that is" are single calls into C instead of loops.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable


class ChunkLookup(IntEnum):
    """What the tiers say about one chunk."""

    ABSENT = 0
    """In no tier."""
    READY = 1
    """Verified, and loadable at once."""
    ARRIVING = 2
    """Being stored or promoted; may become READY."""
    UNKNOWN = 3
    """A slow tier has not answered yet; may become READY or ABSENT."""
    FAILED = 4
    """Its bytes were bad or could not be read; not offered again to this request."""


LookupCodes = NewType("LookupCodes", bytes)
"""One `ChunkLookup` value per chunk of one group, in chunk order."""

GroupLookups = tuple[LookupCodes, ...]
"""The look-ups of every group, indexed by group id."""

READY_BYTE: Final = bytes([ChunkLookup.READY])
_PENDING: Final = bytes([ChunkLookup.ARRIVING, ChunkLookup.UNKNOWN])
_PENDING_AS_READY: Final = bytes.maketrans(_PENDING, READY_BYTE * len(_PENDING))


def to_codes(lookups: Iterable[ChunkLookup]) -> LookupCodes:
    """Pack look-ups into one byte each."""
    return LookupCodes(bytes(lookups))


def all_ready(num_chunks: int) -> LookupCodes:
    """The look-ups of a group that misses nothing."""
    return LookupCodes(READY_BYTE * num_chunks)


def has_pending(codes: LookupCodes) -> bool:
    """Whether some chunk may still become READY by waiting."""
    return ChunkLookup.ARRIVING in codes or ChunkLookup.UNKNOWN in codes


def once_arrived(codes: LookupCodes) -> LookupCodes:
    """The look-ups as they would be if everything under way arrived."""
    return LookupCodes(codes.translate(_PENDING_AS_READY))
