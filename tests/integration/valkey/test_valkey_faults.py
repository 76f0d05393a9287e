from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ConfigError, TierTimeout, TierUnavailable
from kvstrata.testing.chunks import a_label, content, empty, filled, within
from kvstrata.testing.servers import HOST, free_port, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstrata.testing.servers import ServerProcess
    from kvstrata.tiers.valkey import ValkeyStore

    OpenStore = Callable[..., ValkeyStore]

PASSWORD = "no/one@knows"  # noqa: S105 - a test server's
SPELLED = "no%2Fone%40knows"


@pytest.mark.parametrize("operation", ["read", "write", "find", "remove"])
def test_a_hanging_server_costs_no_more_than_the_deadline(
    own_server: ServerProcess, open_store: OpenStore, operation: str
) -> None:
    store = open_store(_url(own_server), timeout_s=5)
    labels = [a_label(n, payload_bytes=2_000_000) for n in range(20)]
    buffers = [filled(label) for label in labels]
    store.write(buffers, within(10))
    call = getattr(store, operation)
    subject = buffers if operation in {"read", "write"} else [label.key for label in labels]
    own_server.pause()

    start = time.monotonic()
    outcome = call(subject, within(1))

    assert time.monotonic() - start < 2
    assert set(outcome.failed) == {label.key for label in labels}
    assert all(isinstance(error, TierTimeout) for error in outcome.failed.values())


def test_the_configured_timeout_ends_a_wait_before_the_deadline(
    own_server: ServerProcess, open_store: OpenStore
) -> None:
    store, key = open_store(_url(own_server), timeout_s=0.3), a_label(1).key
    own_server.pause()

    start = time.monotonic()
    outcome = store.find([key], within(10))

    assert time.monotonic() - start < 2
    assert isinstance(outcome.failed[key], TierTimeout)


def test_a_server_that_drips_is_left_at_the_deadline(
    server: ServerProcess, open_store: OpenStore
) -> None:
    label = a_label(702, payload_bytes=1_000_000)
    open_store(_url(server)).write([filled(label)], within(10))
    with _dripping(server.port) as port:
        store = open_store(f"valkey://{HOST}:{port}", timeout_s=5)
        start = time.monotonic()
        outcome = store.read([empty(label)], within(1))
        took_s = time.monotonic() - start
        store.close()

    assert took_s < 2
    assert isinstance(outcome.failed[label.key], TierTimeout)


def test_no_reply_is_stale_after_a_hang(own_server: ServerProcess, open_store: OpenStore) -> None:
    store = open_store(_url(own_server))
    labels = [a_label(n, payload_bytes=100_000) for n in range(10)]
    store.write([filled(label) for label in labels], within(10))
    own_server.pause()
    store.read([empty(label) for label in labels], within(0.2))
    own_server.resume()

    buffers = [empty(label) for label in reversed(labels)]
    outcome = store.read(buffers, within(10))

    assert outcome.done == {label.key for label in labels}
    for buffer in buffers:
        assert content(buffer) == content(filled(buffer.label))


def test_a_server_that_comes_back_is_used_again(
    own_server: ServerProcess, open_store: OpenStore
) -> None:
    store, label = open_store(_url(own_server)), a_label(1)
    store.write([filled(label)], within(10))
    own_server.kill()

    for outcome in (
        store.read([empty(label)], within(10)),
        store.write([filled(label)], within(10)),
        store.find([label.key], within(10)),
        store.remove([label.key], within(10)),
    ):
        assert isinstance(outcome.failed[label.key], TierUnavailable)

    own_server.start()
    assert store.read([empty(label)], within(10)).absent == {label.key}
    assert store.write([filled(label)], within(10)).done == {label.key}
    assert store.read([empty(label)], within(10)).done == {label.key}


def test_a_password_is_used_and_never_shown(tmp_path: Path, open_store: OpenStore) -> None:
    label = a_label(1)
    with redis_server(tmp_path, password=PASSWORD) as server:
        right = open_store(f"valkey://:{SPELLED}@{HOST}:{server.port}/3")
        wrong = open_store(f"valkey://:{SPELLED}x@{HOST}:{server.port}")
        assert right.write([filled(label)], within(10)).done == {label.key}
        refused = wrong.find([label.key], within(10)).failed[label.key]
    gone = right.find([label.key], within(10)).failed[label.key]

    assert isinstance(refused, TierUnavailable)
    assert isinstance(gone, TierUnavailable)
    _assert_no_secret(refused, gone, right)


def test_a_password_that_a_server_echoes_is_not_shown(
    tmp_path: Path, open_store: OpenStore
) -> None:
    key = a_label(1).key
    with redis_server(tmp_path, "--rename-command", "AUTH", "OTHER") as server:
        store = open_store(f"valkey://:{SPELLED}@{HOST}:{server.port}")
        fault = store.find([key], within(10)).failed[key]

    assert isinstance(fault, TierUnavailable)
    _assert_no_secret(fault)


def test_a_password_in_an_unreadable_address_is_not_shown(open_store: OpenStore) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(f"valkey://:{PASSWORD}@{HOST}:1")

    assert caught.value.__suppress_context__
    _assert_no_secret(caught.value)


def test_encrypted_connections_work_and_keep_deadlines(
    tmp_path: Path, open_store: OpenStore
) -> None:
    label, port = a_label(1, payload_bytes=3_000_000), free_port()
    url = f"valkeys://localhost:{port}?ssl_ca_certs={tmp_path}/cert.pem"
    with redis_server(tmp_path, *_tls_options(tmp_path, port)) as server:
        store, buffer = open_store(url), empty(label)
        assert store.write([filled(label)], within(10)).done == {label.key}
        assert store.read([buffer], within(10)).done == {label.key}
        assert content(buffer) == content(filled(label))

        server.pause()
        for paused in (store, open_store(url)):
            start = time.monotonic()
            outcome = paused.write([filled(label)], within(1))
            assert time.monotonic() - start < 2
            assert isinstance(outcome.failed[label.key], TierTimeout)


def _url(server: ServerProcess) -> str:
    return f"valkey://{HOST}:{server.port}"


def _assert_no_secret(*things: object) -> None:
    for thing in things:
        for text in (str(thing), repr(thing)):
            assert PASSWORD not in text
            assert SPELLED not in text
            assert "knows" not in text


def _tls_options(folder: Path, port: int) -> list[str]:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    options = {
        "--tls-port": str(port),
        "--tls-cert-file": "cert.pem",
        "--tls-key-file": "key.pem",
        "--tls-ca-cert-file": "cert.pem",
        "--tls-auth-clients": "no",
    }
    return [word for option in options.items() for word in option]


@contextlib.contextmanager
def _dripping(target_port: int) -> Iterator[int]:
    """A proxy that hands every reply on in small pieces, always before a client's patience ends."""
    is_over = threading.Event()

    def drip(client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                client.sendall(server.recv(200))

    def forward(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection((HOST, target_port))
                for job in (drip, forward):
                    threads.append(threading.Thread(target=job, args=(client, server)))
                    threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server((HOST, 0)) as listener:
        threads.append(threading.Thread(target=accept, args=(listener,)))
        threads[0].start()
        yield listener.getsockname()[1]
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(5)
