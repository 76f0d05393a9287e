"""A file system that passes everything on to a folder, and fails as often as it is told to.

    python faulty_fs.py MOUNTPOINT FOLDER RULES LOG

RULES is a file with JSON, read before each operation: the share of operations that fail, their
error number, and whether a file may have two names. Each failed operation is one byte more in LOG. Runs in the foreground until it is
unmounted or killed; stopped by a signal, every access to the mountpoint hangs.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-untyped,import-not-found,unused-ignore]


class FaultyFolder(mfusepy.Operations):  # type: ignore[misc,unused-ignore]
    use_ns = True

    def __init__(self, folder: Path, rules: Path, log: Path) -> None:
        self._folder = folder
        self._rules = rules
        self._log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._rng = random.Random(0)  # noqa: S311 - repeatable on purpose

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:  # noqa: ARG002
        state = self._at(path).lstat()
        times = {
            name: getattr(state, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")
        }
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")
        return times | {name: getattr(state, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:  # noqa: ARG002
        return [".", "..", *(entry.name for entry in self._at(path).iterdir())]

    def create(self, path: str, mode: int, fi: Any = None) -> int:  # noqa: ANN401, ARG002
        self._fail()
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IMODE(mode))

    def open(self, path: str, flags: int) -> int:  # noqa: ARG002
        self._fail()
        return os.open(self._at(path), os.O_RDWR)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:  # noqa: ARG002
        self._fail()
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:  # noqa: ARG002
        self._fail()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:  # noqa: ARG002
        self._fail()
        os.truncate(self._at(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> int:  # noqa: ARG002
        self._fail()
        return 0

    def flush(self, path: str, fh: int) -> int:  # noqa: ARG002
        return 0

    def release(self, path: str, fh: int) -> int:  # noqa: ARG002
        os.close(fh)
        return 0

    def unlink(self, path: str) -> None:
        self._fail()
        self._at(path).unlink()

    def mkdir(self, path: str, mode: int) -> None:
        self._at(path).mkdir(stat.S_IMODE(mode))

    def link(self, target: str, source: str) -> None:
        if not json.loads(self._rules.read_text())["has_links"]:
            raise mfusepy.FuseOSError(errno.EPERM)
        self._at(target).hardlink_to(self._at(source))

    def rename(self, old: str, new: str) -> None:
        self._fail()
        self._at(old).replace(self._at(new))

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        state = os.statvfs(self._at(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
        return {name: getattr(state, name) for name in (*names, "f_namemax")}

    def _at(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def _fail(self) -> None:
        rules = json.loads(self._rules.read_text())
        if self._rng.random() < rules["share"]:
            os.write(self._log_fd, b".")
            raise mfusepy.FuseOSError(rules["errno"])


if __name__ == "__main__":
    mountpoint, *others = sys.argv[1:]
    folder, rules, log = (Path(path) for path in others)
    mfusepy.FUSE(FaultyFolder(folder, rules, log), mountpoint, foreground=True, nothreads=True)
