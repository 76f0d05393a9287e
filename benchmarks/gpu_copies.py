"""Times copies between a GPU's caches and pinned memory, beside one large copy by the driver.

    python benchmarks/gpu_copies.py

4.3 GB in 256 chunks: the blocks of 32,768 tokens of a Llama 8B, in 32 layers. Chunks lie in one
extent each, as in an arena with room, or in two.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import TYPE_CHECKING

import torch

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.room import PAGE_BYTES, Extent
from kvstrata.transfers.cache_views import CacheViews
from kvstrata.transfers.copiers import make_queue
from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob

if TYPE_CHECKING:
    from kvstrata.transfers.copy_queue import Copies

NUM_LAYERS, NUM_BLOCKS, BLOCK_TOKENS = 32, 2100, 16
PAGE = 2 * BLOCK_TOKENS * 8 * 128 * 2
NUM_CHUNKS, CHUNK_ROWS = 256, 8
CHUNK_BYTES = PAGE * NUM_LAYERS * CHUNK_ROWS
CHUNK_PAGES = CHUNK_BYTES // PAGE_BYTES
DRIVER_BYTES = 2**30
ROUNDS = 3


def make_views() -> CacheViews:
    """A model's caches."""
    layers = tuple(KVLayer(f"layer {n}", PAGE) for n in range(NUM_LAYERS))
    group = KVGroup(kind=GroupKind.FULL, block_tokens=BLOCK_TOKENS, layers=layers)
    layout = KVLayout(groups=(group,), hash_block_tokens=BLOCK_TOKENS, dtype="bfloat16")
    shape = (NUM_BLOCKS, 8, BLOCK_TOKENS, 256)
    caches = {
        layer.name: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for layer in layers
    }
    return CacheViews(layout, caches, NUM_BLOCKS)


def make_chunks(num_extents: int) -> tuple[ChunkCopy, ...]:
    """Chunks one behind the other, in so many extents each."""
    size = CHUNK_PAGES // num_extents
    return tuple(
        ChunkCopy(
            ChunkKey(n.to_bytes(4, "big")),
            GroupId(0),
            tuple(Extent(n * CHUNK_PAGES + part * size, size) for part in range(num_extents)),
            CHUNK_BYTES,
            tuple(range(1 + n * CHUNK_ROWS, 1 + (n + 1) * CHUNK_ROWS)),
        )
        for n in range(NUM_CHUNKS)
    )


def timed(queue: Copies, job: CopyJob) -> dict[str, float]:
    """The best of some rounds."""
    rounds = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        queue.submit([job])
        submitted = time.perf_counter()
        while not (reports := queue.take_reports()):
            pass
        [report] = reports
        if report.failed:
            raise RuntimeError("a copy failed")
        rounds.append((report.num_bytes / report.seconds / 1e9, (submitted - start) * 1e3))
    gigabytes, submit_ms = max(rounds[1:])
    return {"gb_per_s": round(gigabytes, 1), "submit_ms": round(submit_ms, 2)}


def driver_speed(target: torch.Tensor, source: torch.Tensor) -> float:
    """One large copy, in GB/s."""
    best = 0.0
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, DRIVER_BYTES / (time.perf_counter() - start) / 1e9)
    return round(best, 1)


def main() -> None:
    """Measure and print."""
    host = torch.empty(DRIVER_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(DRIVER_BYTES, dtype=torch.uint8, device="cuda")
    arena = HostArena(NUM_CHUNKS * CHUNK_BYTES)
    if not arena.pin():
        raise RuntimeError("the arena cannot be pinned")
    queue = make_queue(make_views(), arena)
    result = {
        "driver": {"load": driver_speed(device, host), "store": driver_speed(host, device)},
        "extents": {
            str(num): {
                "store": timed(queue, CopyJob(1, make_chunks(num))),
                "load": timed(queue, CopyJob(2, make_chunks(num), waiting_request="one")),
            }
            for num in (1, 2)
        },
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    queue.close()
    arena.close()
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
