"""Golden hit counts from real request traces.

KVSTRATA_TRACES names the folder with `conversation.jsonl` and `synthetic.jsonl`, the traces that
Mooncake published (kvcache-ai/Mooncake, FAST25-release/traces). A trace has a request a line, with
`hash_ids`: one per block, prefix first, equal ids for equal prefixes.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.ids import BlockHash, GroupId, chunk_key
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.registry import POLICIES
from kvstrata.testing.policy_contract import any_may_leave

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata.config.schema import EvictionName
    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import EvictionPolicy

FOLDER = os.environ.get("KVSTRATA_TRACES")
PERCENTS = (1, 5, 10, 25, 50)

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="KVSTRATA_TRACES does not name a folder with traces"
)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    requests: tuple[tuple[ChunkKey, ...], ...]

    @functools.cached_property
    def num_accesses(self) -> int:
        return sum(map(len, self.requests))

    @functools.cached_property
    def num_unique(self) -> int:
        return len({key for request in self.requests for key in request})


@dataclass(frozen=True)
class ReplayResult:
    """What a policy made of a trace."""

    num_hits: int
    num_evictions: int


def replay(trace: Trace, policy: EvictionPolicy, capacity_blocks: int) -> ReplayResult:
    """Blocks of size 1, admitted together; then blocks leave until the rest fits.

    A request hits up to its first missing block.
    """
    present: set[ChunkKey] = set()
    num_hits = num_evictions = 0
    for request in trace.requests:
        num_hits += num_leading(request, present)
        policy.insert(request, [1] * len(request))
        present.update(request)
        while len(present) > capacity_blocks:
            victim = policy.evict(any_may_leave)
            assert victim in present
            present.remove(victim)
            num_evictions += 1
    return ReplayResult(num_hits, num_evictions)


def num_leading(request: tuple[ChunkKey, ...], present: set[ChunkKey]) -> int:
    return next((n for n, key in enumerate(request) if key not in present), len(request))


@functools.cache
def read_trace(name: str) -> Trace:
    with Path(FOLDER or "", f"{name}.jsonl").open(encoding="utf-8") as lines:
        return Trace(tuple(tuple(map(block_key, json.loads(line)["hash_ids"])) for line in lines))


@functools.cache
def block_key(hash_id: int) -> ChunkKey:
    return chunk_key(BlockHash(hash_id.to_bytes(32, "big")), GroupId(0))


@pytest.mark.parametrize(
    ("name", "capacity_blocks", "num_hits", "num_evictions"),
    [
        ("conversation", 18_279, 80_466, 189_755),
        ("conversation", 45_697, 101_978, 140_825),
        ("conversation", 91_395, 104_759, 92_346),
        ("synthetic", 4_392, 31_973, 85_512),
        ("synthetic", 10_981, 54_123, 56_773),
        ("synthetic", 21_962, 71_763, 28_152),
    ],
)
def test_lru_finds_exactly_what_a_reference_finds(
    name: str, capacity_blocks: int, num_hits: int, num_evictions: int
) -> None:
    result = replay(read_trace(name), LruPolicy(capacity_blocks), capacity_blocks)
    assert result == ReplayResult(num_hits, num_evictions)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_no_policy_falls_far_behind_lru(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(name)
    rates = {
        policy: [hit_rate(trace, make(capacity), capacity) for capacity in capacities(trace)]
        for policy, make in POLICIES.items()
    }
    with capsys.disabled():
        print_table(name, rates)

    for policy, row in rates.items():
        worst = min(rate - lru for rate, lru in zip(row, rates["lru"], strict=True))
        assert worst > -0.04, policy
        assert row[0] >= rates["lru"][0], f"{policy} should help in a small tier"


def capacities(trace: Trace) -> list[int]:
    return [trace.num_unique * percent // 100 for percent in PERCENTS]


def hit_rate(trace: Trace, policy: EvictionPolicy, capacity_blocks: int) -> float:
    return replay(trace, policy, capacity_blocks).num_hits / trace.num_accesses


def print_table(name: str, rates: Mapping[EvictionName, list[float]]) -> None:
    lines = ["", f"{name:12} " + " ".join(f"{percent:5}%" for percent in PERCENTS)]
    lines += [f"{policy:12} " + " ".join(f"{r:6.2%}" for r in row) for policy, row in rates.items()]
    print(*lines, sep="\n")  # noqa: T201 - the table is for the reader
