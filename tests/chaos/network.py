"""Two network namespaces with a cable between them, and servers in one of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstrata.testing.servers import ServerProcess

from .support import BUCKET

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER_ADDRESS, CLIENT_ADDRESS = "10.213.7.1", "10.213.7.2"
REDIS_PORT, S3_PORT = 7379, 7380
_PUT_BUCKET = """
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT"), timeout=1)
"""


class Cable:
    """What connects the two; either end may be pulled."""

    def __init__(self) -> None:
        self.server_space = f"kvs-server-{os.getpid()}"
        self.client_space = f"kvs-client-{os.getpid()}"
        self._ends = (f"kvs0-{os.getpid() % 10**6}", f"kvs1-{os.getpid() % 10**6}")

    def lay(self) -> None:
        """Make the namespaces and everything in them."""
        spaces = (self.server_space, self.client_space)
        for space in spaces:
            _ip("netns", "add", space)
        near, far = self._ends
        _ip(
            "link", "add", near, "netns", spaces[0], "type", "veth", "peer", far, "netns", spaces[1]
        )
        for space, end, address in zip(
            spaces, self._ends, (SERVER_ADDRESS, CLIENT_ADDRESS), strict=True
        ):
            _ip("-n", space, "address", "add", f"{address}/30", "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def pull(self) -> None:
        """From now on packets vanish."""
        _ip("-n", self.server_space, "link", "set", self._ends[0], "down")

    def plug(self) -> None:
        _ip("-n", self.server_space, "link", "set", self._ends[0], "up")

    def remove(self) -> None:
        """Take the namespaces away; the cable goes with them."""
        for space in (self.server_space, self.client_space):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", space)

    def at_server(self) -> list[str]:
        """In front of a command that is to run beside the server."""
        return ["ip", "netns", "exec", self.server_space]

    def at_client(self) -> list[str]:
        """In front of a command that is to run at the other end."""
        return ["ip", "netns", "exec", self.client_space]


@contextlib.contextmanager
def laid_cable() -> Iterator[Cable]:
    """Two connected namespaces."""
    cable = Cable()
    try:
        try:
            cable.lay()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"no network namespaces here: {detail.strip()}")
        yield cable
    finally:
        cable.remove()


@contextlib.contextmanager
def distant_redis(cable: Cable, folder: Path) -> Iterator[ServerProcess]:
    """A Redis that can be reached through the cable alone."""
    options = ["--port", str(REDIS_PORT), "--bind", SERVER_ADDRESS, "--protected-mode", "no"]
    ping = ["redis-cli", "-h", SERVER_ADDRESS, "-p", str(REDIS_PORT), "ping"]
    command = [*cable.at_server(), "redis-server", *options, "--save", ""]
    yield from _served(command, REDIS_PORT, folder, [*cable.at_client(), *ping])


@contextlib.contextmanager
def distant_s3(cable: Cable, folder: Path) -> Iterator[ServerProcess]:
    """An S3 server that can be reached through the cable alone."""
    python = sys.executable
    options = ["-m", "moto.server", "-H", SERVER_ADDRESS, "-p", str(S3_PORT)]
    put = [python, "-c", _PUT_BUCKET, f"http://{SERVER_ADDRESS}:{S3_PORT}/{BUCKET}"]
    command = [*cable.at_server(), python, *options]
    yield from _served(command, S3_PORT, folder, [*cable.at_client(), *put])


def _served(
    command: list[str], port: int, folder: Path, probe: list[str]
) -> Iterator[ServerProcess]:
    def is_ready() -> bool:
        return not subprocess.run(probe, check=False, capture_output=True).returncode

    server = ServerProcess(command, port, folder, is_ready)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)  # noqa: S607
