from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.testing.faults import Tally
from kvstrata.testing.servers import redis_server, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstrata.testing.servers import ServerProcess

_WHOLE_RUN = Tally()
_LINES: list[str] = []


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """A test's own figures; they are reported, and become part of the whole run's."""
    mine = Tally()
    yield mine
    _WHOLE_RUN.add(mine)
    _LINES.append(f"{request.node.name}: {mine.summary()}")


@pytest.fixture
def whole_run() -> Tally:
    """The figures of all tests so far."""
    return _WHOLE_RUN


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that keeps nothing when it ends."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[ServerProcess]:
    with s3_server(tmp_path, "chunks") as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _LINES:
        return
    terminalreporter.section("chaos")
    for line in _LINES:
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    for kind, count in _WHOLE_RUN.faults.most_common():
        terminalreporter.write_line(f"{count:8} {kind}")
    terminalreporter.write_line(f"all: {_WHOLE_RUN.summary()}")
