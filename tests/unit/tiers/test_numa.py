from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.numa import cores_of_node, node_of_device, touch_on_node
from kvstrata.tiers.room import PAGE_BYTES, Extent

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set())]
)
def test_core_lists_are_read(tmp_path: Path, text: str, cores: set[int]) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(text)

    assert cores_of_node(1, tmp_path) == cores
    assert cores_of_node(2, tmp_path) == set()


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("?\n", None)])
def test_a_devices_node_is_read(tmp_path: Path, text: str, node: int | None) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)

    assert node_of_device("0000:3B:00.0", tmp_path) == node
    assert node_of_device("none", tmp_path) is None


def test_touched_memory_is_zero_and_usable() -> None:
    memory = memoryview(bytearray(b"\x01" * (3 * PAGE_BYTES + 5)))

    assert touch_on_node(memory, 0, PAGE_BYTES) == bool(cores_of_node(0))


def test_an_arena_can_be_placed_on_a_node() -> None:
    arena = HostArena(8 * PAGE_BYTES, numa_node=0)
    (part,) = arena.parts([Extent(0, 8)])

    assert not any(part)
    part.release()
    arena.close()


def test_memory_that_another_process_filled_is_left_as_it_is() -> None:
    name = f"kvstrata-test-{id(object())}"
    first = HostArena(4 * PAGE_BYTES, shared_name=name)
    (part,) = first.parts([Extent(0, 1)])
    part[:5] = b"hello"
    second = HostArena(4 * PAGE_BYTES, shared_name=name, numa_node=0)
    (other,) = second.parts([Extent(0, 1)])

    assert bytes(other[:5]) == b"hello"
    for view in (part, other):
        view.release()
    second.close()
    first.close()
