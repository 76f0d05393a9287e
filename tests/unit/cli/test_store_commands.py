"""The store commands as a user runs them: real processes, real exit codes, real files."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.core.chunk_label import Rank
from kvstrata.operations.directory_listing import DirectoryListing
from kvstrata.testing.chunks import a_label, a_namespace, filled, within
from kvstrata.tiers.filesystem import FilesystemStore

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 14_096

# Registers the commands, unless the program has them already.
PROGRAM = """
from kvstrata.cli import main, store_commands
names = {command.name for command in main.app.registered_commands}
for name in {"inspect", "verify", "gc"} - names:
    function = name if name == "gc" else f"{name}_store"
    main.app.command(name)(getattr(store_commands, function))
main.main()
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def run_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.stderr == ""
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store [bold]"
    store = FilesystemStore(
        FilesystemTierConfig(path=str(path), durability="none"), a_namespace(), Rank()
    )
    store.write([filled(a_label(number)) for number in (1, 2, 3)], within(30))
    store.close()
    DirectoryListing(path).correct_usage()
    for number in (1, 2, 3):
        os.utime(chunk(path, number), ns=(number * 10**9, 0))
    return path


def chunk(root: Path, number: int) -> Path:
    (path,) = root.glob(f"namespaces/*/*/{a_label(number).key.hex()}.*")
    return path


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_inspect_shows_a_store(root: Path) -> None:
    result = run("inspect", root)

    assert result.returncode == 0
    assert f"{root}: directory, format 1, 41.3 KiB" in result.stdout
    assert f"namespace {a_namespace().fingerprint}" in result.stdout
    assert "3 chunks, 3 complete, 3 files, 41.3 KiB" in result.stdout
    assert "ranks 0 of 1; used 1970-01-01 00:00:01Z to 1970-01-01 00:00:03Z" in result.stdout
    assert "usage counter: 42,288 bytes, right" in result.stdout
    assert result.stderr == ""


def test_inspect_as_json(root: Path) -> None:
    nothing = {"files": 0, "bytes": 0}

    assert run_json("inspect", f"file://{root}") == {
        "address": str(root),
        "medium": "directory, format 1",
        "total_bytes": 3 * SIZE,
        "namespaces": [
            {
                "fingerprint": a_namespace().fingerprint,
                "chunks": 3,
                "complete_chunks": 3,
                "files": 3,
                "bytes": 3 * SIZE,
                "ranks": ["0of1"],
                "groups": [
                    {
                        "group": 0,
                        "kind": "full",
                        "block_tokens": 16,
                        "chunk_tokens": 64,
                        "files": 3,
                        "bytes": 3 * SIZE,
                    }
                ],
                "oldest_use": "1970-01-01T00:00:01+00:00",
                "newest_use": "1970-01-01T00:00:03+00:00",
            }
        ],
        "strays": nothing,
        "temporary": nothing,
        "leftovers": nothing,
        "quarantined": nothing,
        "usage": {"counted_bytes": 3 * SIZE, "found_bytes": 3 * SIZE},
    }


def test_verify_passes_a_healthy_store(root: Path) -> None:
    result = run("verify", root)

    assert result.returncode == 0
    assert result.stdout == f"{root}: 3 files, 41.3 KiB, all fine\n"
    assert result.stderr == ""


def test_verify_names_what_is_bad_and_exits_with_one(root: Path) -> None:
    damage(chunk(root, 2))

    result = run("verify", root)

    name = chunk(root, 2).relative_to(root)
    assert result.returncode == 1
    assert f"bad: {name}: payload does not match its checksum\n" in result.stdout
    assert "3 files, 41.3 KiB, 1 not fine" in result.stdout
    assert chunk(root, 2).exists()


def test_verify_as_json(root: Path) -> None:
    damage(chunk(root, 2))

    assert run_json("verify", root) == {
        "address": str(root),
        "clean": False,
        "files": 3,
        "bytes": 3 * SIZE,
        "usage_right": True,
        "findings": [
            {
                "name": str(chunk(root, 2).relative_to(root)),
                "verdict": "bad",
                "reason": "payload does not match its checksum",
                "moved_to": None,
            }
        ],
    }


def test_verify_fixes_when_told_to_and_is_clean_then(root: Path) -> None:
    bad = chunk(root, 2)
    damage(bad)

    result = run("verify", root, "--fix")

    assert result.returncode == 1
    assert f"-> quarantine/{bad.name}\n" in result.stdout
    assert not bad.exists()
    assert run("verify", root).returncode == 0


def test_gc_keeps_what_was_used_last(root: Path) -> None:
    kept = chunk(root, 3)

    result = run("gc", root, "--quota", "20kB")

    assert result.returncode == 0
    assert "evicted: 2 files, 27.5 KiB" in result.stdout
    assert f"{root}: 13.8 KiB left of 41.3 KiB, within 19.5 KiB" in result.stdout
    assert list(root.glob("namespaces/*/*/*")) == [kept]


def test_gc_as_json(root: Path) -> None:
    assert run_json("gc", root, "--quota", "30kB") == {
        "address": str(root),
        "quota_reached": True,
        "quota_bytes": 30_000,
        "before_bytes": 3 * SIZE,
        "after_bytes": 2 * SIZE,
        "foreign_bytes": 0,
        "evicted": {"files": 1, "bytes": SIZE},
        "leftovers": {"files": 0, "bytes": 0},
        "alone": True,
        "usage_right": True,
    }


def test_gc_exits_with_one_above_the_quota(root: Path) -> None:
    (chunk(root, 1).parent / ".elsewhere-1-1.tmp").write_bytes(b"x" * 2000)

    result = run("gc", root, "--quota", "1kB")

    assert result.returncode == 1
    assert "2.0 KiB left of 43.2 KiB, still above 1000 B" in result.stdout


@pytest.mark.parametrize("quota", ["lots", "10", "5 bananas", "1.5.5GiB"])
def test_a_wrong_size_changes_nothing(root: Path, quota: str) -> None:
    result = run("gc", root, "--quota", quota)

    assert result.returncode == 2
    assert result.stderr.startswith(f"error: --quota: '{quota}' is not ")
    assert result.stderr.count("accepted: ") == 1
    assert len(list(root.glob("namespaces/*/*/*"))) == 3


COMMANDS = [("inspect",), ("verify",), ("verify", "--fix"), ("gc", "--quota", "0")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_is_no_store_stays_as_it_was(
    tmp_path: Path, command: tuple[str, ...], form: tuple[str, ...]
) -> None:
    folder = tmp_path / "photos [/x]"
    (folder / "namespaces" / "a" / "bb").mkdir(parents=True)
    (folder / "namespaces" / "a" / "bb" / "file").write_text("x")
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        os.utime(path, ns=(10**9, 2 * 10**9))
    before = {path: path.lstat() for path in paths}

    result = run(*command, *form, folder)

    assert {path: path.lstat() for path in before} == before
    assert [folder, *folder.rglob("*")] == paths
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {folder}: no kvstrata store; accepted: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("address", ["ftp://user:secret@host/x", "nowhere", "two\nlines"])
def test_wrong_addresses_are_one_line_and_code_two(command: tuple[str, ...], address: str) -> None:
    result = run(*command, address)

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.stderr


def test_gc_is_for_directories() -> None:
    result = run("gc", "s3://bucket/x", "--quota", "0")
    assert result.returncode == 2
    assert "no directory's address" in result.stderr


def test_names_that_cannot_be_printed_are_escaped(root: Path) -> None:
    odd = os.fsencode(chunk(root, 1).parent) + b"/a\nb\xff[red]"
    with open(odd, "wb"):  # noqa: PTH123 - no Path has such a name
        pass

    result = run("verify", root)

    assert result.returncode == 1
    assert "/a\\nb\\udcff[red]: its name or folder is no chunk's\n" in result.stdout


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("gc", "--quota", "1kB")])
def test_a_terminal_gets_a_bar_and_json_does_not(root: Path, command: tuple[str, ...]) -> None:
    assert "\x1b[?25l" in on_a_terminal(*command, str(root))  # the cursor is hidden meanwhile
    json.loads(on_a_terminal(*command, str(root), "--json"))


def on_a_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    output = b""
    try:
        while piece := os.read(ours, 4096):
            output += piece
    except OSError:  # a terminal ends with an error
        pass
    finally:
        os.close(ours)
        process.wait(timeout=30)
    return output.decode()
