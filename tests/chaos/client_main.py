"""A process with a store: does what each line of its input says, and prints how it ended."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.config.schema import (
    FilesystemTierConfig,
    ObjectStoreTierConfig,
    TierConfig,
    ValkeyTierConfig,
)
from kvstrata.config.units import ByteSize, Duration
from kvstrata.core.chunk_label import Rank
from kvstrata.testing.chunks import a_label, a_namespace, content, empty, filled, within
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.object_store import BucketStore
from kvstrata.tiers.valkey import ValkeyStore

if TYPE_CHECKING:
    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.interfaces import ChunkStore

SEEDS = range(4)


def opened(settings: dict[str, Any]) -> ChunkStore:
    config: TierConfig = msgspec.convert(settings, TierConfig, dec_hook=quantity)
    if isinstance(config, FilesystemTierConfig):
        return FilesystemStore(config, a_namespace(), Rank())
    if isinstance(config, ValkeyTierConfig):
        return ValkeyStore(config, a_namespace(), Rank())
    assert isinstance(config, ObjectStoreTierConfig)
    return BucketStore(config, a_namespace(), Rank())


def quantity(kind: type, text: object) -> ByteSize | Duration:
    return ByteSize.parse(text) if kind is ByteSize else Duration.parse(text)


def settle(folder: str, uid: int | None) -> None:
    """Change into a folder, and become another user there."""
    os.chdir(folder)
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def called(store: ChunkStore, order: dict[str, Any]) -> dict[str, Any]:
    """Do what was asked for, and describe the outcome."""
    labels = {a_label(number).key: number for number in order["numbers"]}
    buffers = [
        filled(a_label(n), seed=order["seed"]) if order["verb"] == "write" else empty(a_label(n))
        for n in order["numbers"]
    ]
    start = time.monotonic()
    outcome = carried_out(store, order, buffers)
    seconds = time.monotonic() - start
    read = [b for b in buffers if order["verb"] == "read" and b.label.key in outcome.done]
    return {
        "done": sorted(labels[key] for key in outcome.done),
        "absent": sorted(labels[key] for key in outcome.absent),
        "failed": {str(labels[k]): type(e).__name__ for k, e in outcome.failed.items()},
        "num_wrong": sum(not is_right(buffer) for buffer in read),
        "seconds": seconds,
    }


def carried_out(
    store: ChunkStore, order: dict[str, Any], buffers: list[ChunkBuffer]
) -> TierOutcome:
    deadline = within(order["seconds"])
    if order["verb"] == "read":
        return store.read(buffers, deadline)
    if order["verb"] == "write":
        return store.write(buffers, deadline)
    keys = [buffer.label.key for buffer in buffers]
    return (store.find if order["verb"] == "find" else store.remove)(keys, deadline)


def is_right(buffer: ChunkBuffer) -> bool:
    """Whether a whole chunk of one of the writers came back."""
    return content(buffer) in {content(filled(buffer.label, seed=seed)) for seed in SEEDS}


def main() -> None:
    settings, place = (json.loads(argument) for argument in sys.argv[1:])
    settle(**place)
    store = opened(settings)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(called(store, json.loads(line))) + "\n")
        sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    main()
