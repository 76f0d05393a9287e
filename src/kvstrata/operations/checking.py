"""Whether raw bytes are the chunk that their place promises."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from kvstrata.operations.listing import shown_name
from kvstrata.tiers.chunk_format import CHECKSUM, BadChunk, checksum, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.operations.listing import Place, StoreListing
    from kvstrata.tiers.chunk_format import ChunkHeader


def check_chunk(listing: StoreListing, place: Place) -> None:
    """Read a chunk completely and check everything that can be checked without its request.

    Raises:
        BadChunk: says what is wrong with it.
        FileNotFoundError: it went away meanwhile.
        OSError: it cannot be read.
    """
    with closing(listing.read(place)) as pieces:
        page = next(pieces, memoryview(b""))
        check_place(place)
        header = parse_header(page)
        check_header_at(header, place)
        payload = _Metered(pieces)
        found = checksum(payload)
    if payload.num_bytes != header.payload_bytes:
        raise BadChunk(f"payload of {payload.num_bytes} bytes instead of {header.payload_bytes}")
    if found != header.checksum:
        raise BadChunk("payload does not match its checksum")


def check_place(place: Place) -> None:
    """Whether readers would ever look there.

    Raises:
        BadChunk: they would not.
    """
    if place.chunk is None:
        raise BadChunk("its name or folder is no chunk's")


def check_header_at(header: ChunkHeader, place: Place) -> None:
    """Compare a header with where it was found.

    Raises:
        BadChunk: names the first difference.
    """
    assert place.chunk is not None
    expected = {
        "namespace": place.namespace,
        "key": place.chunk.key,
        "rank": place.chunk.rank.index,
        "num_ranks": place.chunk.rank.count,
        "checksum_algorithm": CHECKSUM,
    }
    for name, wanted in expected.items():
        found = getattr(header, name)
        if found != wanted:
            raise BadChunk(f"header says {name} {_shown(found)}, its place {_shown(wanted)}")


class _Metered:
    """Pieces on their way to the checksum, counted."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self.num_bytes = 0

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self.num_bytes += piece.nbytes
            yield piece


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else shown_name(str(value))
