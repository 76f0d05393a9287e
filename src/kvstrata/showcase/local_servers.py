"""Servers of this machine's own on free loopback ports: Redis or Valkey, and S3."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"
VALKEY_PROGRAMS: Final = ("redis-server", "valkey-server")
_READY_WITHIN_S: Final = 15.0
_POLL_S: Final = 0.02


class ServerProcess:
    """A server that can be stopped in every way.

    Args:
        command: starts it; the same every time, so that a restart serves the same port.
        port: where it listens.
        folder: its working directory, where its log goes too.
        is_ready: whether it answers.
    """

    def __init__(
        self, command: Sequence[str], port: int, folder: Path, is_ready: Callable[[], bool]
    ) -> None:
        self._command = list(command)
        self._folder = folder
        self._is_ready = is_ready
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            TimeoutError: it did not; the end of its log says more.
        """
        log = self._folder / f"server-{self.port}.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603 - the command is this module's own
                self._command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wait_until(self._is_ready, f"{self._command[0]} on port {self.port}")
        except TimeoutError as error:
            self.kill()
            raise TimeoutError(f"{error}: {log.read_text()[-2000:]}") from error

    def pause(self) -> None:
        """Stop it from running, connections open; afterwards it surely does not run."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Let it run again."""
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. Does nothing if it does not run."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the server was not started"
        return self.process


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Poll until it is true.

    Raises:
        TimeoutError: it was not, in fifteen seconds.
    """
    give_up = time.monotonic() + _READY_WITHIN_S
    while not is_true():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} was not ready within {_READY_WITHIN_S:g} s")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, password: str = "") -> Iterator[ServerProcess]:
    """A Redis or Valkey server that keeps nothing on disk.

    Args:
        folder: a temporary directory.
        options: as on the command line, as in `"--maxmemory", "4mb"`.
        password: what clients must give; empty: nothing.

    Raises:
        FileNotFoundError: neither is installed.
        TimeoutError: it does not answer.
    """
    port = free_port()
    command = [_program(*VALKEY_PROGRAMS), "--port", str(port), "--bind", HOST, "--save", ""]
    secret = ["--requirepass", password] if password else []
    with _started(
        [*command, *secret, *options], port, folder, lambda: _answers_ping(port, password)
    ) as server:
        yield server


@contextlib.contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[ServerProcess]:
    """A server that speaks S3 over HTTP, with one bucket; it takes any credentials."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    # Ready when the bucket is there, after a restart too: the server forgets everything.
    address = f"http://{HOST}:{port}/{bucket}"
    with _started(command, port, folder, lambda: _has_put(address)) as server:
        yield server


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _started(
    command: Sequence[str], port: int, folder: Path, is_ready: Callable[[], bool]
) -> Iterator[ServerProcess]:
    server = ServerProcess(command, port, folder, is_ready)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _program(*names: str) -> str:
    paths = [path for path in map(shutil.which, names) if path]
    if not paths:
        raise FileNotFoundError(f"neither {' nor '.join(names)} is installed")
    return paths[0]


def _answers_ping(port: int, password: str) -> bool:
    questions = [f"AUTH {password}"] * bool(password) + ["PING"]
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.sendall("".join(f"{line}\r\n" for line in questions).encode())
            with connection.makefile("rb") as answers:
                return [answers.readline() for _ in questions][-1] == b"+PONG\r\n"
    except OSError:
        return False


def _has_put(address: str) -> bool:
    request = urllib.request.Request(address, method="PUT")  # noqa: S310 - the loopback's
    try:
        with urllib.request.urlopen(request, timeout=1) as answer:  # noqa: S310
            return bool(answer.status == HTTPStatus.OK)
    except (urllib.error.URLError, OSError):
        return False
