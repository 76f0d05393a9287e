from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import resource
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import ChunkBuffer, Rank
from kvstrata.testing.chunks import a_label, a_namespace, content, empty, filled
from kvstrata.tiers import file_io, python_file_io
from kvstrata.tiers.chunk_format import (
    HEADER_BYTES,
    check_chunk,
    checksum,
    make_header,
    unsealed_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.tiers.file_io import FileCalls

OWNER = (a_namespace(), Rank())
SIZES = (1, 4095, 4096, 10_000, 1_000_001)


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def a_page(content: bytes = b"") -> mmap.mmap:
    page = mmap.mmap(-1, HEADER_BYTES)
    page[: len(content)] = content
    return page


def write(calls: FileCalls, path: Path, chunk: ChunkBuffer, *, direct: bool = True) -> None:
    page = a_page(unsealed_header(chunk.label, *OWNER))
    size = HEADER_BYTES + chunk.label.payload_bytes
    temporary = f"{path}.tmp"
    error = calls.write(
        temporary, str(path), page, chunk.parts, num_bytes=size, direct=direct, sync=True
    )
    assert error == 0


def read(calls: FileCalls, path: Path, chunk: ChunkBuffer, *, note_use: bool = False) -> int:
    """The file's size; what is in it, when the size is right, is checked."""
    page, size = a_page(), HEADER_BYTES + chunk.label.payload_bytes
    count, digest = calls.read(
        str(path), page, chunk.parts, num_bytes=size, direct=True, note_use=note_use
    )
    if count == size:
        check_chunk(page[:], chunk.label, *OWNER, digest)
    else:
        assert digest == b""
    return count


@pytest.mark.parametrize("payload_bytes", SIZES)
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_header_and_payload(
    file_calls: FileCalls, tmp_path: Path, payload_bytes: int, num_parts: int, *, direct: bool
) -> None:
    chunk = filled(a_label(1, payload_bytes=payload_bytes), num_parts=num_parts)
    write(file_calls, tmp_path / "x", chunk, direct=direct)

    raw = (tmp_path / "x").read_bytes()
    assert raw == make_header(chunk.label, *OWNER, chunk.payload()) + content(chunk)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert oct((tmp_path / "x").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("payload_bytes", SIZES)
def test_both_read_what_either_wrote(
    file_calls: FileCalls, tmp_path: Path, payload_bytes: int
) -> None:
    label = a_label(1, payload_bytes=payload_bytes)
    write(file_calls, tmp_path / "x", filled(label))

    for calls in (python_file_io, file_calls):
        buffer = empty(label, num_parts=2)
        assert read(calls, tmp_path / "x", buffer) == HEADER_BYTES + payload_bytes
        assert content(buffer) == content(filled(label))


def test_more_parts_than_one_call_takes(file_calls: FileCalls, tmp_path: Path) -> None:
    label = a_label(1, payload_bytes=2500 * 4096 - 7)
    source, target = filled(label, num_parts=2500), empty(label, num_parts=2400)
    write(file_calls, tmp_path / "x", source)

    assert read(file_calls, tmp_path / "x", target) == HEADER_BYTES + label.payload_bytes
    assert content(target) == content(source)


def test_parts_that_lie_on_no_page_or_are_empty(file_calls: FileCalls, tmp_path: Path) -> None:
    label = a_label(1, payload_bytes=9_000)
    memory = memoryview(bytearray(content(filled(label)) + b"behind"))
    cuts = [0, 0, 1, 5_000, 5_000, 9_006]
    odd = ChunkBuffer(label, tuple(memory[a:b] for a, b in itertools.pairwise(cuts)))
    write(file_calls, tmp_path / "x", odd)
    memory[:] = bytes(9_006)

    assert read(file_calls, tmp_path / "x", odd) == HEADER_BYTES + 9_000
    assert bytes(memory[:9_000]) == content(filled(label))


@pytest.mark.parametrize("size", [0, 100, 4096, 4097, 14_095])
def test_a_file_that_is_too_short_says_its_size(
    file_calls: FileCalls, tmp_path: Path, size: int
) -> None:
    write(file_calls, tmp_path / "x", filled(a_label(1)))
    os.truncate(tmp_path / "x", size)

    assert read(file_calls, tmp_path / "x", empty(a_label(1))) == size


@pytest.mark.parametrize("extra_bytes", [1, 5000])
def test_a_file_that_is_too_long_is_noticed(
    file_calls: FileCalls, tmp_path: Path, extra_bytes: int
) -> None:
    write(file_calls, tmp_path / "x", filled(a_label(1)))
    with (tmp_path / "x").open("ab") as file:
        file.write(bytes(extra_bytes))

    assert read(file_calls, tmp_path / "x", empty(a_label(1))) > HEADER_BYTES + 10_000


def test_a_missing_file_is_named(file_calls: FileCalls, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read(file_calls, tmp_path / "x", empty(a_label(1)))

    assert caught.value.filename == str(tmp_path / "x")


def test_a_use_is_noted_when_asked_for(file_calls: FileCalls, tmp_path: Path) -> None:
    path, later = tmp_path / "x", int(time.time()) + 3600
    write(file_calls, path, filled(a_label(1)))
    os.utime(path, (later, 1000))  # later than the file's change: reads alone leave it so
    read(file_calls, path, empty(a_label(1)))
    silent = path.stat()
    read(file_calls, path, empty(a_label(1)), note_use=True)
    noted = path.stat()

    assert silent.st_mtime == noted.st_mtime == 1000
    assert silent.st_atime == later
    assert noted.st_atime < later


def test_a_write_that_fails_leaves_nothing(file_calls: FileCalls, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()  # nothing can be renamed to it

    with pytest.raises(IsADirectoryError):
        write(file_calls, tmp_path / "x", filled(a_label(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_write_that_stops_half_way_leaves_nothing(file_calls: FileCalls, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # writes come short, then fail
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write(file_calls, tmp_path / "x", filled(a_label(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


def test_anothers_temporary_file_is_left_alone(file_calls: FileCalls, tmp_path: Path) -> None:
    (tmp_path / "x.tmp").write_text("another's")

    with pytest.raises(FileExistsError):
        write(file_calls, tmp_path / "x", filled(a_label(1)))
    assert (tmp_path / "x.tmp").read_text() == "another's"


def test_read_only_memory_can_be_written_from(file_calls: FileCalls, tmp_path: Path) -> None:
    label = a_label(1)
    fixed = ChunkBuffer(label, (memoryview(content(filled(label))),))
    write(file_calls, tmp_path / "x", fixed)

    assert read(file_calls, tmp_path / "x", empty(label)) == HEADER_BYTES + label.payload_bytes
    with pytest.raises((BufferError, TypeError)):
        read(file_calls, tmp_path / "x", fixed)


def test_counters_are_added_to(file_calls: FileCalls, tmp_path: Path) -> None:
    numbers = struct.Struct("<3q")
    with (tmp_path / "x").open("xb+", buffering=0) as file:
        assert file_calls.add(file.fileno(), numbers.pack(1, 2, 2**60)) == numbers.pack(1, 2, 2**60)
        sums = file_calls.add(file.fileno(), numbers.pack(-3, 1, 0))

    assert sums == numbers.pack(-2, 3, 2**60)
    assert (tmp_path / "x").read_bytes() == sums


def test_counters_that_are_locked_are_left_alone(file_calls: FileCalls, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("xb+", buffering=0) as file, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            file_calls.add(file.fileno(), bytes(8))
        fcntl.flock(other, fcntl.LOCK_UN)
        assert file_calls.add(file.fileno(), bytes(8)) == bytes(8)

        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was let go of
    assert path.read_bytes() == bytes(8)


def test_counters_that_cannot_be_written_are_let_go_of(
    file_calls: FileCalls, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(8))
    with path.open("rb") as file, path.open("rb") as other:
        with pytest.raises(OSError, match="Bad file descriptor"):
            file_calls.add(file.fileno(), bytes(8))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(not file_io.HAS_NATIVE, reason="the native file calls were not built")
@pytest.mark.parametrize("num_bytes", [-1, 0, 4095, 3 * 4096 + 1, 2**62])
def test_native_calls_stay_within_memory(tmp_path: Path, num_bytes: int) -> None:
    chunk = empty(a_label(1, payload_bytes=8192))
    page = a_page(unsealed_header(chunk.label, *OWNER))
    (tmp_path / "x").write_bytes(bytes(20_000))

    with pytest.raises(ValueError, match="room for 12288 bytes"):
        file_io.calls.read(
            str(tmp_path / "x"),
            page,
            chunk.parts,
            num_bytes=num_bytes,
            direct=False,
            note_use=False,
        )
    with pytest.raises(ValueError, match="room for 12288 bytes"):
        file_io.calls.write(
            "t",
            str(tmp_path / "x"),
            page,
            chunk.parts,
            num_bytes=num_bytes,
            direct=False,
            sync=False,
        )


@pytest.mark.skipif(not file_io.HAS_NATIVE, reason="the native file calls were not built")
@pytest.mark.parametrize("header", [bytes(4096), b"\xff" * 4096])
def test_native_calls_complete_nothing_but_headers(tmp_path: Path, header: bytes) -> None:
    chunk = empty(a_label(1))

    with pytest.raises(ValueError, match="no header page"):
        file_io.calls.write(
            f"{tmp_path}/t",
            f"{tmp_path}/x",
            a_page(header),
            chunk.parts,
            num_bytes=14_096,
            direct=False,
            sync=False,
        )
    assert not list(tmp_path.iterdir())


def test_the_checksum_is_that_of_the_payload(file_calls: FileCalls, tmp_path: Path) -> None:
    for size in (1, 16, 17, 128, 129, 240, 241, 512, 1024, 4096, 262_144, 262_145):
        label = a_label(size, payload_bytes=size)
        write(file_calls, tmp_path / str(size), filled(label))
        for num_parts in (1, 2):
            _, digest = file_calls.read(
                str(tmp_path / str(size)),
                a_page(),
                empty(label, num_parts=num_parts).parts,
                num_bytes=HEADER_BYTES + size,
                direct=False,
                note_use=False,
            )
            assert digest == checksum(filled(label).payload())
