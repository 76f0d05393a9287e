"""Mounts that fail for real: a small memory file system, and one whose server obeys a test."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.testing.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def small_tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A mounted memory file system with room for so many bytes."""
    folder.mkdir()
    options = f"size={size_bytes},mode=0755"
    _mount_or_skip(["mount", "-t", "tmpfs", "-o", options, "kvstrata-chaos", str(folder)])
    try:
        yield folder
    finally:
        unmount(folder)


def remount(folder: Path, mode: str) -> None:
    """Make a mount `ro` or `rw`."""
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)  # noqa: S607


def unmount(folder: Path) -> None:
    """Take a mount away, whoever still uses it."""
    subprocess.run(["umount", "-l", str(folder)], check=False, stderr=subprocess.DEVNULL)  # noqa: S607


class FaultyMount:
    """A folder behind a FUSE server that can be stopped, and told to fail."""

    def __init__(self, base: Path) -> None:
        self.path = base / "mount"
        self._rules, self._log = base / "rules.json", base / "faults.log"
        backing = base / "backing"
        for folder in (self.path, backing):
            folder.mkdir()
        self._rules_now: dict[str, float] = {"has_links": True}
        self.fail(0.0)
        self._log.write_bytes(b"")
        script = Path(__file__).with_name("faulty_fs.py")
        paths = (str(p) for p in (self.path, backing, self._rules, self._log))
        self._server = subprocess.Popen([sys.executable, str(script), *paths])

    @property
    def num_faults(self) -> int:
        """Operations that failed until now."""
        return self._log.stat().st_size

    def fail(self, share: float, error: int = errno.EIO) -> None:
        """From now on this share of the operations fails."""
        self._set(share=share, errno=error)

    def forbid_links(self) -> None:
        """From now on a file has one name alone, as on many network file systems."""
        self._set(has_links=False)

    def _set(self, **rules: float) -> None:
        self._rules_now |= rules
        aside = self._rules.with_suffix(".new")
        aside.write_text(json.dumps(self._rules_now))
        aside.replace(self._rules)

    def wait_until_mounted(self) -> None:
        wait_until(self.path.is_mount, "the FUSE mount")

    def hang(self) -> None:
        """From now on nothing that touches the mount returns."""
        self._server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Let everything go on."""
        self._server.send_signal(signal.SIGCONT)

    def die(self) -> None:
        """Kill the server, which frees whoever hangs; every access fails from now on."""
        self._server.kill()
        self._server.wait()

    def close(self) -> None:
        """Kill the server and unmount."""
        self.die()
        unmount(self.path)


@contextlib.contextmanager
def faulty_mount(base: Path) -> Iterator[FaultyMount]:
    """A mount whose faults a test decides."""
    if find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    if not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None:
        pytest.skip("no FUSE: /dev/fuse or fusermount3 (Debian: fuse3) is missing")
    base.mkdir()
    mount = FaultyMount(base)
    try:
        mount.wait_until_mounted()
        yield mount
    finally:
        mount.close()


def _mount_or_skip(command: list[str]) -> None:
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the kernel forbids mounts here: {made.stderr.strip()}")


class LoopDisk:
    """An ext4 file system in a file, which turns read-only when it finds an error."""

    def __init__(self, base: Path) -> None:
        self.path = base / "disk"
        self._image = base / "disk.img"
        self.path.mkdir(parents=True)

    def mount(self, size_bytes: int) -> None:
        with self._image.open("wb") as image:
            image.truncate(size_bytes)
        subprocess.run(["mkfs.ext4", "-q", str(self._image)], check=True)  # noqa: S607
        options = "loop,errors=remount-ro"
        _mount_or_skip(["mount", "-t", "ext4", "-o", options, str(self._image), str(self.path)])

    def report_error(self) -> None:
        """Make the kernel act as on a damaged structure: from now on nothing can be written."""
        device = Path(os.path.realpath(self._source())).name
        trigger = Path("/sys/fs/ext4") / device / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("the kernel cannot be asked for an ext4 error")
        trigger.write_text("chaos")

    def _source(self) -> str:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return next(line.split()[0] for line in lines if line.split()[1] == str(self.path))


@contextlib.contextmanager
def loop_disk(base: Path, size_bytes: int) -> Iterator[LoopDisk]:
    """A disk of its own, mounted."""
    disk = LoopDisk(base)
    disk.mount(size_bytes)
    try:
        yield disk
    finally:
        unmount(disk.path)
