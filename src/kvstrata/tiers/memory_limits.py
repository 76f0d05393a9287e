"""How much memory this process may still take, as far as the system tells."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Free and reclaimable memory, or what a container's limit leaves; None: nobody knows."""
    known = [room for room in (_of_machine(meminfo), _of_container(cgroup)) if room is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """What a limit leaves; files in the page cache count as used there but give way."""
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
        [cached] = [int(line.split()[1]) for line in lines if line.startswith("file ")]
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return None
    return max(0, limit - used + cached)
