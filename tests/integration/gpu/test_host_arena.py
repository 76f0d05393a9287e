"""Needs a GPU: a pinned arena takes asynchronous copies at full speed, on the GPU's own node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.numa import node_of_device
from kvstrata.tiers.room import PAGE_BYTES, Extent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NUM_BYTES = 256 * 2**20


def test_a_pinned_arena_takes_asynchronous_copies() -> None:
    gpu: Any = torch.cuda.get_device_properties(0)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    arena = HostArena(NUM_BYTES, numa_node=node_of_device(address))
    assert arena.pin()
    (part,) = arena.parts([Extent(0, NUM_BYTES // PAGE_BYTES)])
    host = torch.frombuffer(part, dtype=torch.uint8)
    assert host.is_pinned()
    source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")

    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()

    assert torch.equal(host, source.cpu())
