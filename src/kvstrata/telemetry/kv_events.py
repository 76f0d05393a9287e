"""KV events as vLLM 0.32 puts them on the wire, so that existing routers read them.

A batch is a msgpack array `[ts, events, data_parallel_rank]`; an event is a map whose `type` is its
class name. Fields stand in vLLM's order, and an event leaves out those that hold their default. The
structs here are immutable where vLLM's are not, which does not show in the bytes.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"

LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"

ExternalHash: TypeAlias = bytes | int
"""A block hash on the wire: all its bytes, or its low 64 bits as a number."""

BlockExtraKeys: TypeAlias = tuple[Any, ...]
"""What besides its tokens went into a block's hash: LoRA, media, salt."""


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Something happened to cached blocks."""


class BlockStored(KVCacheEvent, frozen=True):
    """Blocks can be found in a medium from now on."""

    block_hashes: tuple[ExternalHash, ...]
    """In the order of their tokens."""
    parent_block_hash: ExternalHash | None
    """The prefix that the first block follows; None: it is the first of its request."""
    token_ids: tuple[int, ...]
    block_size: int
    """Tokens per hash."""
    lora_id: int | None
    """Kept for old readers; `lora_name` is what counts."""
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[BlockExtraKeys | None, ...] | None = None
    """One entry per hash."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, as the publisher sees it; None: not said."""
    ownership: str | None = None
    """The tier's name."""
    session_id: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks can no longer be found in a medium."""

    block_hashes: tuple[ExternalHash, ...]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Nothing that the publisher announced before can be found any more, in any medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Events that a publisher sends together."""

    ts: float
    """Seconds since the epoch."""
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(batch: KVEventBatch) -> bytes:
    """A batch as bytes."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """A batch from its bytes; fields that newer publishers add are skipped.

    Raises:
        msgspec.DecodeError: these are not the bytes of a batch.
    """
    return _decoder.decode(payload)


def as_bytes(block_hash: bytes) -> ExternalHash:
    """A hash as it is."""
    return block_hash


def as_low_64_bits(block_hash: bytes) -> ExternalHash:
    """A hash as the number that vLLM publishes when it is set to publish numbers."""
    return int.from_bytes(block_hash[-8:], "big")
