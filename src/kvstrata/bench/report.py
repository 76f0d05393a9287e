"""What every benchmark reports: goals with what was measured, and the series behind them."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure with what it should be."""

    name: str
    value: float
    goal: float
    unit: str
    direction: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool:
        """Whether the figure is as good as its goal."""
        if self.direction == "at most":
            return self.value <= self.goal
        return self.value >= self.goal


@dataclass(frozen=True, slots=True)
class Series:
    """How figures grow with a size, or differ by name: one row each, one column per figure."""

    title: str
    size_name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int | str, tuple[float, ...]], ...]


def describe_machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
    }


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark."""

    name: str
    setting: str
    """What was measured, in a sentence."""
    goals: tuple[Goal, ...]
    series: tuple[Series, ...] = ()
    machine: dict[str, str] = field(default_factory=describe_machine)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        data = asdict(self)
        data["goals"] = [asdict(goal) | {"met": goal.met} for goal in self.goals]
        return data


def fastest_s(work: Callable[[], object], *, repeats: int) -> float:
    """Seconds of the fastest of several runs: what the work costs when nothing interferes."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
