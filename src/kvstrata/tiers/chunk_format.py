"""The bytes of a chunk below host memory: one header page, then the payload.

    0     8  magic "KVSTRATA"
    8     2  format version
    10    4  length of the header's body
    14    8  checksum (xxh3, 64 bits) of the body
    22    .  body: msgpack of `ChunkHeader`
    4096  .  payload

The header fills one 4 KiB page, so that the payload is aligned for direct I/O. Readers check
everything: a header that differs from what was asked for in any point is not this chunk.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from kvstrata.core.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from mmap import mmap

    from kvstrata.core.chunk_label import ChunkLabel, Namespace, Rank
    from kvstrata.core.ids import ChunkKey

MAGIC: Final = b"KVSTRATA"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
CHECKSUM: Final = "xxh3-128"

_ZEROS: Final = bytes(HEADER_BYTES)
_PREFIX: Final = struct.Struct("<8sHIQ")
_LENGTH: Final = struct.Struct("<I")
_LENGTH_AT: Final = 10
_SEAL: Final = struct.Struct("<Q")
_SEAL_AT: Final = 14
_NO_DIGEST: Final = bytes(16)


class BadChunk(Exception):  # noqa: N818 - what it is; becomes ChunkCorrupt at the tier's edge
    """These bytes are not the chunk that was asked for."""


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the header's body says."""

    namespace: str
    key: bytes
    kind: GroupKind
    block_tokens: int
    first_token: int
    last_token: int
    """One past the last."""
    parent: bytes
    rank: int
    num_ranks: int
    payload_bytes: int
    checksum_algorithm: str
    checksum: bytes
    """Of the payload. The last field, so that it ends the body: it is known last."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(ChunkHeader)


def checksum(parts: Iterable[memoryview]) -> bytes:
    """The checksum of a payload that lies in several parts. Releases the interpreter's lock."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def make_header(
    label: ChunkLabel, namespace: Namespace, rank: Rank, payload: Iterable[memoryview]
) -> bytes:
    """The header page of a chunk with this payload."""
    return header_page(label, namespace, rank, checksum(payload))


def header_page(label: ChunkLabel, namespace: Namespace, rank: Rank, digest: bytes) -> bytes:
    """The header page of a chunk whose payload has this checksum."""
    return pack_header(_header(label, namespace, rank, digest))


def _header(label: ChunkLabel, namespace: Namespace, rank: Rank, digest: bytes) -> ChunkHeader:
    """What the header of a chunk says."""
    return ChunkHeader(
        namespace=namespace.fingerprint,
        key=label.key,
        kind=label.kind,
        block_tokens=label.block_tokens,
        first_token=label.tokens.start,
        last_token=label.tokens.stop,
        parent=label.parent,
        rank=rank.index,
        num_ranks=rank.count,
        payload_bytes=label.payload_bytes,
        checksum_algorithm=CHECKSUM,
        checksum=digest,
    )


def unsealed_header(label: ChunkLabel, namespace: Namespace, rank: Rank) -> bytes:
    """The header page of a chunk, for `seal_header` to complete."""
    body = _encoder.encode(_header(label, namespace, rank, _NO_DIGEST))
    return (_PREFIX.pack(MAGIC, VERSION, len(body), 0) + body).ljust(HEADER_BYTES, b"\0")


def seal_header(page: mmap, digest: bytes) -> None:
    """Complete a header page with the payload's checksum, which ends its body, and its own."""
    (length,) = _LENGTH.unpack_from(page, _LENGTH_AT)
    end = _PREFIX.size + length
    page[end - len(digest) : end] = digest
    _SEAL.pack_into(page, _SEAL_AT, xxhash.xxh3_64_intdigest(page[_PREFIX.size : end]))


def pack_header(header: ChunkHeader) -> bytes:
    """A header as one page."""
    body = _encoder.encode(header)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body))
    return (prefix + body).ljust(HEADER_BYTES, b"\0")


def parse_header(page: bytes | memoryview) -> ChunkHeader:
    """Read a header page.

    Raises:
        BadChunk: it is none, of another version, or damaged.
    """
    page = bytes(page)
    if len(page) < HEADER_BYTES:
        raise BadChunk(f"header page of {len(page)} bytes instead of {HEADER_BYTES}")
    magic, version, length, digest = _PREFIX.unpack_from(page)
    if magic != MAGIC:
        raise BadChunk("no chunk: the magic bytes are missing")
    if version != VERSION:
        raise BadChunk(f"format version {version}, this reader knows {VERSION}")
    end = _PREFIX.size + length
    body = page[_PREFIX.size : end]
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != digest:
        raise BadChunk("damaged header")
    if page[end:] != _ZEROS[end:]:
        raise BadChunk("bytes behind the header")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BadChunk(f"header does not parse: {error}") from error


def check_chunk(
    page: bytes, label: ChunkLabel, namespace: Namespace, rank: Rank, digest: bytes
) -> None:
    """Compare a header page, and the checksum of what came behind it, with what was asked for.

    Raises:
        BadChunk: names the first difference.
    """
    if page == header_page(label, namespace, rank, digest):
        return
    header = parse_header(page)
    check_header(header, label, namespace, rank)
    if header.checksum != digest:
        raise BadChunk("payload does not match its checksum")


def check_header(header: ChunkHeader, label: ChunkLabel, namespace: Namespace, rank: Rank) -> None:
    """Compare a header with what was asked for.

    Raises:
        BadChunk: names the first difference.
    """
    expected = _header(label, namespace, rank, header.checksum)
    if header == expected:
        return
    for name in ChunkHeader.__struct_fields__:
        found, wanted = getattr(header, name), getattr(expected, name)
        if found != wanted:
            raise BadChunk(f"{name} is {_shown(found)}, expected {_shown(wanted)}")


def check_payload(header: ChunkHeader, payload: Iterable[memoryview]) -> None:
    """Compare a payload with its header's checksum.

    Raises:
        BadChunk: they differ.
    """
    if checksum(payload) != header.checksum:
        raise BadChunk("payload does not match its checksum")


def key_name(key: ChunkKey) -> str:
    """A key as a name for files and objects."""
    return key.hex()


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
