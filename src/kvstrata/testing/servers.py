"""Real servers on free loopback ports, for tests: Redis alone, Redis as a cluster, and S3."""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

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
from functools import partial
from typing import TYPE_CHECKING, Final

from redis import Redis
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"
_READY_WITHIN_S: Final = 15.0
_POLL_S: Final = 0.02
_NUM_SLOTS: Final = 16384


class ServerProcess:
    """A server that can be stopped in every way a test may want.

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
    """A Redis server that keeps nothing on disk.

    Args:
        folder: a temporary directory.
        options: as on the command line, as in `"--maxmemory", "4mb"`.
        password: what clients must give; empty: nothing.
    """
    port = free_port()
    command = [_program("redis-server"), "--port", str(port), "--bind", HOST, "--save", ""]
    secret = ["--requirepass", password] if password else []
    with _started(
        [*command, *secret, *options], port, folder, lambda: _answers_ping(port, password)
    ) as server:
        yield server


@contextlib.contextmanager
def redis_cluster(folder: Path, num_nodes: int = 3) -> Iterator[list[ServerProcess]]:
    """A cluster of primaries that share the slots evenly."""
    with contextlib.ExitStack() as nodes:
        servers = [
            nodes.enter_context(redis_server(folder, *_cluster_options(index)))
            for index in range(num_nodes)
        ]
        _form_cluster(servers)
        yield servers


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


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def _answers_ping(port: int, password: str) -> bool:
    try:
        with Redis(HOST, port, password=password or None, socket_timeout=1) as client:
            return bool(client.ping())
    except RedisError:
        return False


def _has_put(address: str) -> bool:
    request = urllib.request.Request(address, method="PUT")  # noqa: S310 - the loopback's
    try:
        with urllib.request.urlopen(request, timeout=1) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cluster_options(index: int) -> list[str]:
    # The default bus port, 10000 above the port, may be taken or not exist.
    options = {
        "--cluster-enabled": "yes",
        "--cluster-config-file": f"nodes-{index}.conf",
        "--cluster-port": str(free_port()),
        "--cluster-node-timeout": "2000",
        "--cluster-require-full-coverage": "no",
        "--dbfilename": f"node-{index}.rdb",
    }
    return [word for option in options.items() for word in option]


def _form_cluster(servers: Sequence[ServerProcess]) -> None:
    """Share the slots out, introduce the nodes, and wait until every node sees all of it."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Redis(HOST, server.port)) for server in servers]
        cuts = [_NUM_SLOTS * index // len(servers) for index in range(len(servers) + 1)]
        bus = [client.config_get("cluster-port")["cluster-port"] for client in clients]
        for index, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", cuts[index], cuts[index + 1] - 1)
            clients[0].execute_command("CLUSTER", "MEET", HOST, servers[index].port, bus[index])
        for client in clients:
            wait_until(partial(_is_whole, client, len(servers)), "the cluster")


def _is_whole(client: Redis, num_nodes: int) -> bool:
    facts = client.execute_command("CLUSTER", "INFO").decode().split()
    return {
        "cluster_state:ok",
        f"cluster_slots_ok:{_NUM_SLOTS}",
        f"cluster_known_nodes:{num_nodes}",
        f"cluster_size:{num_nodes}",
    } <= set(facts)
