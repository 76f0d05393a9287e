"""Tokens to prefix-chained block hashes, computed once per block.

Each hash covers the whole prefix up to the end of its block, so equal hashes mean equal prefixes
under equal extra keys (salt, LoRA, media). SHA-256 because a tenant who can make two prompts
collide can read another tenant's cache.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, overload

from kvstrata.core.ids import BlockHash
from kvstrata.core.spans import TokenSpan, whole_units
from kvstrata.errors import LayoutError

Digest = Callable[[bytes], bytes]

_SEED: Final = b"kvstrata/prefix/1"
_UNSIGNED_32: Final = "I"


def sha256(message: bytes) -> bytes:
    """The default digest."""
    return hashlib.sha256(message).digest()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture, sound or other input that stands in for some of the tokens."""

    identifier: str
    """The engine's hash of the content."""
    tokens: TokenSpan


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides the tokens decides the cache's content."""

    cache_salt: str | None = None
    lora: str | None = None
    media: tuple[MediaSpan, ...] = ()


class PrefixHasher:
    """The block hashes of one request, grown as its tokens arrive.

    Ownership: belongs to one request on the scheduler thread; dropped with it. `hashes` is the
    live list: it only ever grows, and readers keep no copy.

    Args:
        hash_block_tokens: tokens per hash.
        extra_keys: what keeps this request apart from others with the same tokens.
        digest: the hash function.
    """

    def __init__(
        self,
        hash_block_tokens: int,
        extra_keys: ExtraKeys | None = None,
        digest: Digest = sha256,
    ) -> None:
        if hash_block_tokens < 1:
            raise LayoutError(f"hash_block_tokens is {hash_block_tokens}, but must be at least 1")
        self._extra_keys = extra_keys or ExtraKeys()
        self._block_tokens = hash_block_tokens
        self._digest = digest
        self._tail = array(_UNSIGNED_32)
        self._parent = digest(self._seed())
        self._hashes: list[BlockHash] = []

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """One hash per complete block so far."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, the incomplete block included."""
        return len(self._hashes) * self._block_tokens + len(self._tail)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; hashes every block they complete, and nothing twice.

        Raises:
            ValueError: a token id is negative or does not fit 32 bits; nothing was appended.
        """
        tail = self._tail + _pack(tokens)
        num_blocks = whole_units(len(tail), self._block_tokens)
        data = memoryview(_little_endian(tail))
        block_bytes = self._block_tokens * tail.itemsize
        first = len(self._hashes)
        for index in range(num_blocks):
            message = self._parent + data[index * block_bytes : (index + 1) * block_bytes]
            if self._extra_keys.media:
                message += self._media_part(first + index)
            self._parent = self._digest(message)
            self._hashes.append(BlockHash(self._parent))
        self._tail = tail[num_blocks * self._block_tokens :]

    def _seed(self) -> bytes:
        return b"".join(
            (
                _SEED,
                self._block_tokens.to_bytes(8, "little"),
                _field(self._extra_keys.cache_salt),
                _field(self._extra_keys.lora),
            )
        )

    def _media_part(self, block: int) -> bytes:
        """The media that touch a block, each with where the block lies inside it."""
        start = block * self._block_tokens
        block_span = TokenSpan(start, start + self._block_tokens)
        return b"".join(
            _field(media.identifier)
            + (start - media.tokens.start).to_bytes(8, "little", signed=True)
            for media in self._extra_keys.media
            if media.tokens.touches(block_span)
        )


class AdoptedHashes(Sequence[BlockHash]):
    """An engine's own chained hashes, read in place at a layout's hash block size.

    A chained hash at a coarse boundary is the fine hash that ends there, so nothing is computed
    and the engine's list may go on growing.

    Raises:
        LayoutError: the engine hashes at a size that does not divide the layout's.
    """

    def __init__(
        self, engine_hashes: Sequence[bytes], *, engine_tokens: int, hash_block_tokens: int
    ) -> None:
        if engine_tokens < 1 or hash_block_tokens % engine_tokens:
            raise LayoutError(
                f"the engine hashes every {engine_tokens} tokens, which does not divide "
                f"hash_block_tokens {hash_block_tokens}"
            )
        self._engine_hashes = engine_hashes
        self._step = hash_block_tokens // engine_tokens

    def __len__(self) -> int:
        return whole_units(len(self._engine_hashes), self._step)

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return BlockHash(self._engine_hashes[(position + 1) * self._step - 1])


def _pack(tokens: Iterable[int]) -> array[int]:
    try:
        return array(_UNSIGNED_32, iter(tokens))  # bytes would be read as raw memory
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _field(text: str | None) -> bytes:
    """One optional string, so that no two lists of fields read the same."""
    if text is None:
        return b"\x00"
    data = text.encode()
    return b"\x01" + len(data).to_bytes(8, "little") + data
