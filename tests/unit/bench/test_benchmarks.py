from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstrata.bench import filesystem, host
from kvstrata.tiers.room import PAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.config.schema import EvictionName

SMALL_FILES = filesystem.Scale(
    chunk_sizes=(PAGE_BYTES, 4 * PAGE_BYTES),
    total_bytes=16 * PAGE_BYTES,
    num_threads=2,
    num_rounds=2,
    num_listed=300,
)
SMALL_HOST = host.Scale(
    num_indexed=2_000,
    capacity_bytes=512 * host.MIB,
    num_turnovers=3,
    copy_sizes=(256 * host.KIB,),
    arena_bytes=256 * host.MIB,
    num_rounds=2,
)


def test_the_filesystem_is_measured_and_left_clean(tmp_path: Path) -> None:
    report = filesystem.run(SMALL_FILES, tmp_path)

    assert len(report.goals) == 5
    assert all(goal.value > 0 for goal in report.goals)
    assert [len(series.rows) for series in report.series] == [2, 2]
    assert "direct I/O" in report.setting or "buffered I/O" in report.setting
    assert json.dumps(report.as_json())
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(filesystem, "measure_listing", fail)
    with pytest.raises(OSError, match="no more"):
        filesystem.run(SMALL_FILES, tmp_path)

    assert not list(tmp_path.iterdir())


def test_the_host_tier_is_measured() -> None:
    report = host.run(SMALL_HOST)

    assert len(report.goals) == 7
    assert all(goal.value > 0 for goal in report.goals)
    assert [size for size, _ in report.series[0].rows] == list(host.MIXTURE)
    assert json.dumps(report.as_json())


def test_loss_counts_rounding_and_free_room() -> None:
    meter = host.steady_state(SMALL_HOST, "lru")

    assert meter.lost_bytes
    assert max(meter.lost_bytes) < max(host.MIXTURE) + SMALL_HOST.capacity_bytes // 100


@pytest.mark.slow
def test_an_arena_in_steady_state_loses_little() -> None:
    scale = host.Scale()
    names: tuple[EvictionName, ...] = ("lru", "arc")
    for eviction in names:
        meter = host.steady_state(scale, eviction)
        assert max(meter.lost_bytes) <= 0.05 * scale.capacity_bytes
