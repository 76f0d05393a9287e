"""Puts memory on the NUMA node of a GPU, so that copies do not cross the processor's inner links.

Pages belong to the node of the core that touches them first. So a thread bound to the node's cores
touches each page once. On a machine with one node, or one that does not tell, nothing is done.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

_DEVICES: Final = Path("/sys/bus/pci/devices")
_NODES: Final = Path("/sys/devices/system/node")


def node_of_device(pci_address: str, devices: Path = _DEVICES) -> int | None:
    """The NUMA node of a PCI device, as in `0000:3b:00.0`; None when there is none to tell."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_of_node(node: int, nodes: Path = _NODES) -> frozenset[int]:
    """The cores of a node; empty when the system does not tell."""
    try:
        text = (nodes / f"node{node}" / "cpulist").read_text()
    except OSError:
        return frozenset()
    return frozenset(_parse_list(text))


def touch_on_node(memory: memoryview, node: int, page_bytes: int) -> bool:
    """Touch every page of new memory on a node; whether that was possible."""
    cores = cores_of_node(node) & os.sched_getaffinity(0)
    if not cores:
        return False
    thread = threading.Thread(target=_touch, args=(memory, cores, page_bytes))
    thread.start()
    thread.join()
    return True


def _touch(memory: memoryview, cores: frozenset[int], page_bytes: int) -> None:
    os.sched_setaffinity(0, cores)  # of this thread alone
    memory[::page_bytes] = bytes(len(range(0, memory.nbytes, page_bytes)))


def _parse_list(text: str) -> list[int]:
    """The numbers of a list such as `0-3,8`."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
