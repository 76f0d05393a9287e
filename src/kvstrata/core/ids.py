"""The typed identifiers everything else is keyed by."""

from __future__ import annotations

from typing import Final, NewType

GroupId = NewType("GroupId", int)
"""Position of a KV group in its layout."""

BlockHash = NewType("BlockHash", bytes)
"""Hash of a whole prefix of tokens, up to the end of one hash block."""

ChunkKey = NewType("ChunkKey", bytes)
"""Identity of a chunk inside its namespace: the prefix hash at its end, then its group.

Between the two stand a mark of the weights' generation, once they changed in a running engine, and
one of an adapter's weights.
"""

_GROUP_BYTES: Final = 2


def key_suffix(group_id: GroupId) -> bytes:
    """What a group appends to a prefix hash to make a key."""
    return group_id.to_bytes(_GROUP_BYTES, "big")


def chunk_key(block_hash: BlockHash, group_id: GroupId) -> ChunkKey:
    """The key of the chunk of `group_id` that ends where `block_hash` ends."""
    return ChunkKey(block_hash + key_suffix(group_id))


def key_hash(key: ChunkKey) -> BlockHash:
    """The prefix hash inside a key."""
    return BlockHash(key[:-_GROUP_BYTES])


def key_group(key: ChunkKey) -> GroupId:
    """The group inside a key."""
    return GroupId(int.from_bytes(key[-_GROUP_BYTES:], "big"))
