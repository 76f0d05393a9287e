# `kvstrata.tiers.file_io.FileCalls` in C, outside the interpreter's lock.

import mmap

def add(fd: int, change: bytes, /) -> bytes: ...
def read(
    path: str,
    header: mmap.mmap,
    parts: tuple[memoryview, ...],
    /,
    *,
    num_bytes: int,
    direct: bool,
    note_use: bool,
) -> tuple[int, bytes]: ...
def write(
    temporary: str,
    path: str,
    header: mmap.mmap,
    parts: tuple[memoryview, ...],
    /,
    *,
    num_bytes: int,
    direct: bool,
    sync: bool,
) -> int: ...
