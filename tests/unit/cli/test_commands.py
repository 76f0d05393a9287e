"""The command as a user runs it: real processes, real exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvstrata


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "kvstrata"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache.yaml"
    path.write_text("host: {capacity: 2GiB}\ntiers: [{kind: filesystem, path: /tmp/x}]\n")
    return path


def test_version_is_printed() -> None:
    assert run("--version").stdout == f"kvstrata {kvstrata.__version__}\n"


def test_a_valid_file_passes_the_check(file: Path) -> None:
    result = run("config", "check", str(file))

    assert result.returncode == 0
    assert "valid. Tiers: host, filesystem" in result.stdout


def test_an_invalid_file_fails_with_one_line_and_code_two(file: Path) -> None:
    file.write_text("host: {capacity: lots}\n")

    result = run("config", "check", str(file))

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: host.capacity: 'lots' is not understood; accepted:")
    assert result.stderr.count("\n") == 1


def test_brackets_in_an_error_are_shown_as_they_are(file: Path) -> None:
    file.write_text("tiers: [{kind: filesystem, path: x, '[/bold]': 1}]\n")
    assert "tiers[0].[/bold]: unknown key" in run("config", "check", str(file)).stderr

    file.write_text("tiers: [{kind: filesystem, path: '/a/[red]b[/x]'}]\n")
    assert "/a/[red]b[/x]" in run("config", "explain", str(file)).stdout


def test_explain_shows_values_and_meanings(file: Path) -> None:
    result = run("config", "explain", str(file))

    assert result.returncode == 0
    assert "host.capacity" in result.stdout
    assert "2GiB" in result.stdout
    assert "default" in result.stdout


def test_schema_is_json() -> None:
    schema = json.loads(run("config", "schema").stdout)

    assert "Config" in schema["$defs"]


def test_unknown_commands_are_refused() -> None:
    assert run("nonsense").returncode == 2


@pytest.mark.slow
def test_bench_prints_goals() -> None:
    report = json.loads(run("bench", "planning", "--json").stdout)

    assert report["name"] == "planning"
    assert len(report["goals"]) >= 4
    for goal in report["goals"]:
        assert {"name", "value", "goal", "unit", "met"} <= goal.keys()
        assert goal["met"] == (goal["value"] <= goal["goal"])
    assert [row[0] for row in report["series"][0]["rows"]] == [8192, 32768, 131072, 524288]
