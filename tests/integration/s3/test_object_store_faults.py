from __future__ import annotations

import contextlib
import http.server
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.config.schema import ObjectStoreTierConfig
from kvstrata.config.units import Duration
from kvstrata.errors import ClosedError, TierFull, TierTimeout, TierUnavailable
from kvstrata.testing.chunks import a_label, content, empty, filled, within
from kvstrata.testing.servers import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstrata.testing.servers import ServerProcess
    from kvstrata.tiers.object_store import BucketStore

    OpenStore = Callable[[ObjectStoreTierConfig], BucketStore]

BUCKET = "chunks"


@pytest.mark.parametrize("operation", ["read", "write", "find", "remove"])
def test_a_hanging_server_costs_no_more_than_the_deadline(
    own_server: ServerProcess, open_store: OpenStore, operation: str
) -> None:
    store = open_store(_config(own_server.port))
    labels = [a_label(n, payload_bytes=500_000) for n in range(40)]
    buffers = [filled(label) for label in labels]
    store.write(buffers[:1], within(10))
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
    store, key = open_store(_config(own_server.port, timeout_s=0.3)), a_label(1).key
    own_server.pause()

    start = time.monotonic()
    outcome = store.find([key], within(10))

    assert time.monotonic() - start < 2
    assert isinstance(outcome.failed[key], TierTimeout)


def test_bytes_are_right_after_a_hang(own_server: ServerProcess, open_store: OpenStore) -> None:
    store = open_store(_config(own_server.port))
    labels = [a_label(n) for n in range(10)]
    store.write([filled(label) for label in labels], within(10))
    own_server.pause()
    store.read([empty(label) for label in labels], within(0.2))
    own_server.resume()

    buffers = [empty(label) for label in reversed(labels)]
    outcome = store.read(buffers, within(10))

    assert outcome.done == {label.key for label in labels}
    for buffer in buffers:
        assert content(buffer) == content(filled(buffer.label))


def test_a_timed_out_read_leaves_the_buffer_alone(
    own_server: ServerProcess, open_store: OpenStore
) -> None:
    store, label = open_store(_config(own_server.port)), a_label(1)
    store.write([filled(label)], within(10))
    own_server.pause()
    buffer = empty(label)
    store.read([buffer], within(0.2))
    own_server.resume()

    assert store.read([empty(label)], within(10)).done == {label.key}
    assert not any(content(buffer))


def test_a_server_that_comes_back_is_used_again(
    own_server: ServerProcess, open_store: OpenStore
) -> None:
    store, label = open_store(_config(own_server.port)), a_label(1)
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


def test_a_write_to_a_bucket_that_is_not_there_is_a_fault(
    server: ServerProcess, open_store: OpenStore
) -> None:
    config = ObjectStoreTierConfig(
        url="s3://nowhere", endpoint=f"http://{HOST}:{server.port}", region="us-east-1"
    )
    outcome = open_store(config).write([filled(a_label(1))], within(10))

    assert isinstance(outcome.failed[a_label(1).key], TierUnavailable)


def test_a_server_without_room_is_reported_as_full(open_store: OpenStore) -> None:
    label = a_label(1)
    with _refusing_writes(507, "XMinioStorageFull") as port:
        outcome = open_store(_config(port)).write([filled(label)], within(10))

    assert isinstance(outcome.failed[label.key], TierFull)


def test_secrets_are_never_shown(own_server: ServerProcess, open_store: OpenStore) -> None:
    key, secret = a_label(1).key, os.environ["AWS_SECRET_ACCESS_KEY"]
    config = ObjectStoreTierConfig(
        url=f"s3://{BUCKET}", endpoint=f"http://me:{secret}@{HOST}:{own_server.port}"
    )
    store = open_store(config)
    own_server.kill()
    fault = store.find([key], within(10)).failed[key]

    assert secret not in f"{fault}{fault!r}{store!r}"


def test_a_close_ends_calls_under_way_and_the_thread(open_store: OpenStore) -> None:
    errors: list[ClosedError] = []
    with socket.create_server((HOST, 0)) as silent:
        before = threading.active_count()
        store = open_store(_config(silent.getsockname()[1]))

        def hang() -> None:
            try:
                store.find([a_label(1).key], within(15))
            except ClosedError as error:
                errors.append(error)

        caller = threading.Thread(target=hang)
        caller.start()
        with silent.accept()[0]:  # the request is on its way
            store.close()
            caller.join(5)

    assert len(errors) == 1
    assert threading.active_count() == before


def _config(port: int, *, timeout_s: float = 10) -> ObjectStoreTierConfig:
    return ObjectStoreTierConfig(
        url=f"s3://{BUCKET}/cache",
        endpoint=f"http://{HOST}:{port}",
        region="us-east-1",
        timeout=Duration(timeout_s),
    )


@contextlib.contextmanager
def _refusing_writes(status: int, code: str) -> Iterator[int]:
    """A server that answers every write with an S3 error."""

    class Refusal(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer((HOST, 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
