from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from kvstrata.tiers.disk_budget import BudgetSpent, DiskBudget, Limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("file_calls")

MIB = 2**20


def reserve_many(path: Path, count: int) -> int:
    """How many reservations of one MiB are granted."""
    budget = DiskBudget(path, Limits(quota_bytes=50 * MIB))
    granted = 0
    for _ in range(count):
        try:
            budget.reserve(MIB)
        except BudgetSpent:
            continue
        granted += 1
    return granted


_RESERVE_MANY = """
import sys
from pathlib import Path
from kvstrata.tiers.disk_budget import BudgetSpent, DiskBudget, Limits
budget, granted = DiskBudget(Path(sys.argv[1]), Limits(quota_bytes=50 * 2**20)), 0
for _ in range(30):
    try:
        budget.reserve(2**20)
        granted += 1
    except BudgetSpent:
        pass
print(granted)
"""


def test_reservations_stop_at_the_quota(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits(quota_bytes=10))
    budget.reserve(6)
    with pytest.raises(BudgetSpent, match="quota of 10B is used up"):
        budget.reserve(5)
    budget.release(2)
    budget.reserve(5)

    assert budget.usage().used_bytes == 9


def test_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits(quota_bytes=10, daily_bytes=100))
    budget.reserve(6)
    before = budget.usage()
    for _ in range(50):
        with pytest.raises(BudgetSpent):
            budget.reserve(5)

    assert budget.usage() == before
    budget.correct(6, before)
    assert budget.usage().used_bytes == 6, "a scan does not take it for written either"


def test_processes_and_threads_share_one_count(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    command = [sys.executable, "-c", _RESERVE_MANY, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    granted = sum(int(process.communicate(timeout=60)[0]) for process in processes)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(reserve_many(path, 30))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert granted + sum(results) == 50
    assert DiskBudget(path, Limits()).usage().used_bytes == 50 * MIB


def test_room_is_left_free(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits(min_free_bytes=2**60))

    with pytest.raises(BudgetSpent, match="would be left free"):
        budget.reserve(1)
    assert budget.excess_bytes(0.9) > 0


def test_the_daily_budget_starts_anew_each_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000.0]
    monkeypatch.setattr("kvstrata.tiers.disk_budget.time.time", lambda: now[0])
    budget = DiskBudget(tmp_path / "usage", Limits(daily_bytes=10))
    budget.reserve(10)
    budget.release(10)
    with pytest.raises(BudgetSpent, match="10B have been written today"):
        budget.reserve(1)
    now[0] += 86_400
    budget.reserve(10)

    usage = budget.usage()
    assert (usage.used_bytes, usage.written_bytes) == (10, 10)


def test_a_scan_puts_the_count_right(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits(quota_bytes=100))
    budget.reserve(90)
    assert budget.excess_bytes(0.5) == 40
    before = budget.usage()
    budget.reserve(5)
    budget.correct(30, before)

    assert budget.usage().used_bytes == 35, "what was reserved during the scan counts"
    assert budget.excess_bytes(0.5) == 0


def test_close_is_idempotent(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits())
    budget.close()
    budget.close()


def test_removals_during_a_scan_are_not_subtracted_twice(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits(quota_bytes=1000))
    budget.reserve(900)
    before = budget.usage()
    budget.release(600)
    budget.correct(300, before)

    assert budget.usage().used_bytes == 300


def test_a_count_is_only_corrected_when_nothing_changed(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits())
    before = budget.usage()
    budget.reserve(5)
    budget.release(5)
    assert not budget.correct_if_quiet(100, before)
    assert budget.correct_if_quiet(100, budget.usage())
    assert budget.usage().used_bytes == 100


def test_nobody_waits_for_a_holder_that_hangs(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path / "usage", Limits())
    with (tmp_path / "usage").open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="stayed locked"):
            budget.reserve(1)
    budget.reserve(1)
