"""The bytes are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstrata.telemetry.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    as_bytes,
    as_low_64_bits,
    decode_batch,
    encode_batch,
)

EVERYTHING: dict[str, Any] = {
    "block_hashes": (b"\x01" * 32, 2**64 - 1),
    "parent_block_hash": b"\x02" * 32,
    "token_ids": (1, 2, 3, 70_000),
    "block_size": 2,
    "lora_id": 7,
    "medium": "CPU",
    "lora_name": "sql",
    "extra_keys": (("sql", ("picture", 3), "salt"), None),
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 512,
    "locality": "LOCAL",
    "ownership": "host",
    "session_id": "s",
}
LEAST: dict[str, Any] = {
    "block_hashes": (),
    "parent_block_hash": None,
    "token_ids": (),
    "block_size": 16,
    "lora_id": None,
    "medium": None,
    "lora_name": None,
}
REMOVED: dict[str, Any] = {
    "block_hashes": (b"\x01" * 32,),
    "medium": "STORAGE",
    "group_idx": 0,
    "locality": "REMOTE",
    "ownership": "bucket",
}
BATCH = KVEventBatch(
    1.5,
    (
        BlockStored(**EVERYTHING),
        BlockStored(**LEAST),
        BlockRemoved(**REMOVED),
        BlockRemoved(block_hashes=(3,), medium=None),
        AllBlocksCleared(),
    ),
    3,
)
# Made with vLLM 0.32's own classes.
GOLDEN = bytes.fromhex(
    "93cb3ff8000000000000958fa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4"
    "200101010101010101010101010101010101010101010101010101010101010101cfffffffffffffffffb170"
    "6172656e745f626c6f636b5f68617368c4200202020202020202020202020202020202020202020202020202"
    "020202020202a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f69"
    "6407a66d656469756da3435055a96c6f72615f6e616d65a373716caa65787472615f6b6579739293a373716c"
    "92a77069637475726503a473616c74c0a967726f75705f69647801b26b765f63616368655f737065635f6b69"
    "6e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e64"
    "6f77cd0200a86c6f63616c697479a54c4f43414ca96f776e657273686970a4686f7374aa73657373696f6e5f"
    "6964a17388a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657390b1706172656e745f"
    "626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6510a76c6f72615f6964c0a6"
    "6d656469756dc0a96c6f72615f6e616d65c086a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
    "68617368657391c4200101010101010101010101010101010101010101010101010101010101010101a66d65"
    "6469756da753544f52414745a967726f75705f69647800a86c6f63616c697479a652454d4f5445a96f776e65"
    "7273686970a66275636b657483a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573"
    "9103a66d656469756dc081a474797065b0416c6c426c6f636b73436c656172656403"
)
GOLDEN_WITHOUT_RANK = bytes.fromhex("93cb400000000000000090c0")


def test_batches_encode_to_the_golden_bytes() -> None:
    assert encode_batch(BATCH) == GOLDEN
    assert encode_batch(KVEventBatch(2.0, ())) == GOLDEN_WITHOUT_RANK


def test_golden_bytes_decode_to_the_batch() -> None:
    batch = decode_batch(GOLDEN)

    assert encode_batch(batch) == GOLDEN
    assert batch.events[1:] == BATCH.events[1:]
    assert batch.data_parallel_rank == 3
    assert decode_batch(GOLDEN_WITHOUT_RANK) == KVEventBatch(2.0, ())


def test_fields_of_newer_publishers_are_skipped() -> None:
    events = [{"type": "AllBlocksCleared", "news": 1}]
    payload = msgspec.msgpack.encode([1.0, events, None, "more"])

    assert decode_batch(payload) == KVEventBatch(1.0, (AllBlocksCleared(),))


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "?"}]])])
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(payload)


def test_events_are_values() -> None:
    assert len({BlockStored(**LEAST), BlockStored(**LEAST), AllBlocksCleared()}) == 2


def test_hashes_are_shown_whole_or_by_their_low_bits() -> None:
    block_hash = bytes(range(32))

    assert as_bytes(block_hash) == block_hash
    assert as_low_64_bits(block_hash) == int.from_bytes(block_hash, "big") & (2**64 - 1)


def test_vllm_reads_and_writes_the_same_bytes() -> None:
    vllm = pytest.importorskip("vllm.distributed.kv_events", exc_type=ImportError)
    theirs = msgspec.msgpack.Decoder(vllm.KVEventBatch).decode(GOLDEN)

    assert msgspec.msgpack.encode(theirs) == GOLDEN
    assert theirs.data_parallel_rank == 3
    for mine, other in zip(BATCH.events, theirs.events, strict=True):
        assert type(other).__name__ == type(mine).__name__
        assert type(other).__struct_fields__ == type(mine).__struct_fields__
        assert msgspec.msgpack.encode(other) == msgspec.msgpack.encode(mine)
