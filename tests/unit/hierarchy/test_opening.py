"""The whole way with real files: host memory, disk, restart, damage; two ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.config import parse_config
from kvstrata.config.schema import FilesystemTierConfig, TierConfig, ValkeyTierConfig
from kvstrata.core.lookups import ChunkLookup
from kvstrata.errors import ChunkCorrupt, ConfigError
from kvstrata.hierarchy.opening import open_tier, traffic_for
from kvstrata.hierarchy.tier_stack import TierStack
from kvstrata.policies.registry import make_policy
from kvstrata.testing.chunks import a_label, a_namespace, content, filled, within
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.host_memory import HostMemoryIndex

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstrata.core.chunk_label import ChunkLabel

RANKS, CAPACITY = 2, 2**20
LABELS = [a_label(n, payload_bytes=50_000) for n in range(6)]
KEYS = [label.key for label in LABELS]


class Engine:
    """Arenas and a stack over one directory, as one start of an engine has them."""

    def __init__(self, config: TierConfig) -> None:
        self.arenas = [HostArena(CAPACITY) for _ in range(RANKS)]
        self.host = HostMemoryIndex(CAPACITY, make_policy("arc", CAPACITY))
        self.tier = open_tier(config, a_namespace(), self.arenas, time.monotonic)
        self.stack = TierStack(self.host, [self.tier], time.monotonic)

    def store(self, labels: list[ChunkLabel]) -> None:
        room = self.host.reserve([x.key for x in labels], [x.payload_bytes for x in labels])
        for label in labels:
            for rank, arena in enumerate(self.arenas):
                source, offset = content(filled(label, seed=rank)), 0
                for part in arena.buffer(label, room.granted[label.key]).payload():
                    part[:] = source[offset : offset + part.nbytes]
                    offset += part.nbytes
        self.host.settle(list(room.granted))
        self.stack.demote(labels)

    def poll_until(self, condition: Callable[[], bool]) -> list[object]:
        faults: list[object] = []
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            faults.extend(self.stack.poll().faults)
            time.sleep(0.002)
        return faults


@pytest.fixture
def config(tmp_path: Path) -> TierConfig:
    tier = {"kind": "filesystem", "path": str(tmp_path / "store"), "durability": "none"}
    return parse_config({"tiers": [tier]}).tiers[0]


def test_chunks_survive_a_restart(config: TierConfig) -> None:
    first = Engine(config)
    first.store(LABELS)
    first.poll_until(lambda: len(first.tier.known) == len(LABELS))
    first.stack.close()

    second = Engine(config)
    assert second.stack.lookup(KEYS) == bytes([ChunkLookup.ARRIVING] * 6), "listed, not read"
    second.stack.promote(LABELS, within(10))
    second.poll_until(lambda: second.stack.lookup(KEYS) == bytes([ChunkLookup.READY] * 6))

    for label in LABELS:
        for rank, arena in enumerate(second.arenas):
            buffer = arena.buffer(label, second.host.extents(label.key))
            assert content(buffer) == content(filled(label, seed=rank))
    second.stack.close()


def test_damage_on_disk_is_a_shorter_hit(config: TierConfig, tmp_path: Path) -> None:
    engine = Engine(config)
    engine.store(LABELS)
    engine.poll_until(lambda: len(engine.tier.known) == len(LABELS))
    engine.host.remove(KEYS)
    (victim,) = (tmp_path / "store").glob(f"namespaces/*/*/{KEYS[2].hex()}.1of2")
    raw = bytearray(victim.read_bytes())
    raw[9000] ^= 1
    victim.write_bytes(raw)

    engine.stack.promote(LABELS, within(10))
    faults = engine.poll_until(lambda: engine.stack.lookup(KEYS).count(ChunkLookup.READY) == 5)
    faults += engine.poll_until(lambda: engine.stack.lookup(KEYS[2:3])[0] == ChunkLookup.FAILED)

    assert [type(fault.error) for fault in faults] == [ChunkCorrupt]  # type: ignore[attr-defined]
    engine.stack.close()


def test_a_tier_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")

    with pytest.raises(ConfigError, match="no kvstrata store"):
        Engine(FilesystemTierConfig(path=str(tmp_path)))


def test_servers_get_large_batches_and_files_many_threads() -> None:
    files = traffic_for(FilesystemTierConfig(path="x"))
    server = traffic_for(ValkeyTierConfig(url="valkey://x"))

    assert files.chunks_per_task == 1 < server.chunks_per_task
    assert files.num_threads > server.num_threads
