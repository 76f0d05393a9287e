"""What the system says about memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.memory_limits import available_bytes

if TYPE_CHECKING:
    from pathlib import Path


def container(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text("700\n")
    (folder / "memory.stat").write_text("anon 500\nfile 200\n")
    return folder


def machine(folder: Path) -> Path:
    path = folder / "meminfo"
    path.write_text("MemTotal:  100 kB\nMemAvailable:  2 kB\n")
    return path


def test_a_containers_limit_counts_when_it_is_lower(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path), container(tmp_path, "1000\n")) == 500
    assert available_bytes(machine(tmp_path), container(tmp_path, "100000\n")) == 2048


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path), container(tmp_path, "max\n")) == 2048
    assert available_bytes(machine(tmp_path), tmp_path / "none") == 2048


def test_a_system_that_tells_nothing_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_an_arena_larger_than_the_memory_is_refused() -> None:
    available = available_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match=r"host\.capacity.*available.*less"):
        HostArena(available + 2**34)
