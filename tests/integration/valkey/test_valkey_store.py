from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from functools import partial
from typing import TYPE_CHECKING

from redis import Redis

from kvstrata.errors import ClosedError, TierFull
from kvstrata.testing.chunks import a_label, content, empty, filled, within
from kvstrata.testing.servers import HOST, redis_server
from kvstrata.testing.tier_contract import TierContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import TierOutcome
    from kvstrata.testing.servers import ServerProcess
    from kvstrata.tiers.valkey import ValkeyStore

    OpenStore = Callable[..., ValkeyStore]

MAX_CONNECTIONS = 16


class TestValkeyStore(TierContract):
    """The fixture `medium` is one server."""


def test_values_live_as_long_as_configured(server: ServerProcess, open_store: OpenStore) -> None:
    label = a_label(700)
    open_store(_url(server), ttl_s=90).write([filled(label)], within(10))

    assert 80_000 < _life_ms(server, label.key) <= 90_000


def test_values_live_on_without_a_configured_life(
    server: ServerProcess, open_store: OpenStore
) -> None:
    label = a_label(701)
    open_store(_url(server)).write([filled(label)], within(10))

    assert _life_ms(server, label.key) == -1


def test_a_full_server_is_reported_as_full(tmp_path: Path, open_store: OpenStore) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    labels = [a_label(n, payload_bytes=500_000) for n in range(12)]
    with redis_server(tmp_path, *options) as server:
        store = open_store(_url(server))
        outcome = store.write([filled(label) for label in labels], within(10))
        readable = store.read([empty(label) for label in labels], within(10))

    assert outcome.done
    assert outcome.failed
    assert all(isinstance(error, TierFull) for error in outcome.failed.values())
    assert readable.done == outcome.done
    assert readable.absent == set(outcome.failed)


def test_a_batch_larger_than_a_pipeline_is_cut(
    server: ServerProcess, open_store: OpenStore
) -> None:
    store = open_store(_url(server), timeout_s=10)
    many = [a_label(2000 + n, payload_bytes=100) for n in range(150)]
    large = [a_label(3000 + n, payload_bytes=20 * 2**20) for n in range(3)]
    labels = [*many, *large]

    assert len(store.write([filled(label) for label in labels], within(15)).done) == len(labels)
    buffers = [empty(label) for label in labels]
    assert len(store.read(buffers, within(15)).done) == len(labels)
    assert all(content(buffer) == content(filled(buffer.label)) for buffer in buffers[::50])
    assert len(store.remove([label.key for label in labels], within(10)).done) == len(labels)


def test_one_bad_buffer_of_a_key_asked_for_twice_is_a_fault(
    server: ServerProcess, open_store: OpenStore
) -> None:
    store, good, other = open_store(_url(server)), a_label(9), a_label(9, payload_bytes=9_999)
    store.write([filled(good)], within(10))

    outcome = store.read([empty(other), empty(good)], within(10))

    assert set(outcome.failed) == {good.key}
    assert not outcome.done


def test_more_threads_than_connections_take_turns(
    server: ServerProcess, open_store: OpenStore
) -> None:
    store = open_store(_url(server))
    labels = [a_label(1000 + n) for n in range(40)]
    wrong: list[TierOutcome] = []

    def work(index: int) -> None:
        for _ in range(10):
            written, read = filled(labels[index]), empty(labels[index])
            store.write([written], within(15))
            outcome = store.read([read], within(15))
            if content(read) != content(written):
                wrong.append(outcome)

    _in_threads([partial(work, index) for index in range(40)])

    assert not wrong
    with Redis(HOST, server.port) as client:
        assert client.info("clients")["connected_clients"] <= MAX_CONNECTIONS + 1


def test_a_close_lets_calls_under_way_end_well(
    server: ServerProcess, open_store: OpenStore
) -> None:
    store, label = open_store(_url(server)), a_label(1, payload_bytes=1_000_000)
    store.write([filled(label)], within(10))
    first, outcomes = threading.Event(), []

    def read_until_closed() -> None:
        try:
            while True:
                outcomes.append(store.read([empty(label)], within(10)))
                first.set()
        except ClosedError:
            pass

    def close_soon() -> None:
        first.wait(10)
        store.close()

    _in_threads([read_until_closed, read_until_closed, close_soon])

    assert all(outcome.done == {label.key} for outcome in outcomes)


def test_two_processes_share_a_server(server: ServerProcess, open_store: OpenStore) -> None:
    label = a_label(703)
    code = f"""
        import json
        from kvstrata.config.schema import ValkeyTierConfig
        from kvstrata.core.chunk_label import Rank
        from kvstrata.testing.chunks import a_label, a_namespace, filled, within
        from kvstrata.tiers.valkey import ValkeyStore

        store = ValkeyStore(ValkeyTierConfig(url={_url(server)!r}), a_namespace(), Rank())
        outcome = store.write([filled(a_label(703))], within(10))
        print(json.dumps([key.hex() for key in outcome.done]))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, timeout=15
    )
    assert json.loads(process.stdout) == [label.key.hex()]

    buffer = empty(label)
    assert open_store(_url(server)).read([buffer], within(10)).done == {label.key}
    assert content(buffer) == content(filled(label))


def _url(server: ServerProcess) -> str:
    return f"valkey://{HOST}:{server.port}"


def _life_ms(server: ServerProcess, key: ChunkKey) -> int:
    with Redis(HOST, server.port) as client:
        (name,) = client.keys(f"*{key.hex()}*")
        return int(client.pttl(name))


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
