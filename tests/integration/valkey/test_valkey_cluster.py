# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from redis import Redis

from kvstrata.errors import TierTimeout, TierUnavailable
from kvstrata.testing.chunks import a_label, content, empty, filled, within
from kvstrata.testing.servers import HOST
from kvstrata.testing.tier_contract import Medium, TierContract

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.testing.servers import ServerProcess
    from kvstrata.tiers.valkey import ValkeyStore

    OpenStore = Callable[..., ValkeyStore]


class TestValkeyStoreOverACluster(TierContract):
    @pytest.fixture
    def medium(self, cluster_medium: Medium) -> Medium:
        return cluster_medium


def test_chunks_spread_over_the_nodes(
    own_cluster: list[ServerProcess], open_store: OpenStore
) -> None:
    labels = [a_label(n) for n in range(60)]
    store = open_store(_url(own_cluster[1]), cluster=True)

    assert len(store.write([filled(label) for label in labels], within(10)).done) == 60
    for server in own_cluster:
        with Redis(HOST, server.port) as client:
            assert client.dbsize() >= 5


def test_moved_chunks_are_followed(own_cluster: list[ServerProcess], open_store: OpenStore) -> None:
    label = a_label(1)
    store = open_store(_url(own_cluster[0]), cluster=True)
    store.write([filled(label)], within(10))
    _move_the_only_value(own_cluster)

    buffer = empty(label)
    outcome = store.read([buffer], within(10))
    assert outcome.done == {label.key}, (outcome.absent, outcome.failed)
    assert content(buffer) == content(filled(label))
    assert store.find([label.key], within(10)).done == {label.key}


def test_a_dead_node_costs_its_own_chunks_alone(
    own_cluster: list[ServerProcess], open_store: OpenStore
) -> None:
    labels = [a_label(n) for n in range(30)]
    store = open_store(_url(own_cluster[2]), cluster=True)
    store.write([filled(label) for label in labels], within(10))
    own_cluster[2].kill()

    for _ in range(2):
        outcome = store.read([empty(label) for label in labels], within(5))

        assert outcome.done
        assert len(outcome.done) + len(outcome.failed) == 30
        assert all(isinstance(error, TierUnavailable) for error in outcome.failed.values())


def test_a_hanging_node_holds_no_call_past_its_deadline(
    own_cluster: list[ServerProcess], open_store: OpenStore
) -> None:
    labels = [a_label(n) for n in range(30)]
    store = open_store(_url(own_cluster[0]), cluster=True)
    store.write([filled(label) for label in labels], within(10))
    own_cluster[0].pause()

    for _ in range(3):
        start = time.monotonic()
        outcome = store.read([empty(label) for label in labels], within(1))
        assert time.monotonic() - start < 2
        assert any(isinstance(error, TierTimeout) for error in outcome.failed.values())


def test_a_cluster_that_is_not_there_yet_is_found_later(
    own_cluster: list[ServerProcess], open_store: OpenStore
) -> None:
    store, key = open_store(_url(own_cluster[0]), cluster=True), a_label(1).key
    own_cluster[0].kill()
    assert isinstance(store.find([key], within(5)).failed[key], TierUnavailable)

    own_cluster[0].start()
    assert store.find([a_label(1).key], within(5)).absent == {key}


def _url(server: ServerProcess) -> str:
    return f"valkey://{HOST}:{server.port}"


def _move_the_only_value(servers: list[ServerProcess]) -> None:
    """Give the slot of the one value there is to another node, as a resharding does."""
    clients = [Redis(HOST, server.port) for server in servers]
    source = next(client for client in clients if client.dbsize())
    target = next(client for client in clients if client is not source)
    (name,) = source.keys("*")
    slot = source.execute_command("CLUSTER", "KEYSLOT", name)
    ids = {client: client.execute_command("CLUSTER", "MYID") for client in (source, target)}
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    port = servers[clients.index(target)].port
    source.execute_command("MIGRATE", HOST, port, name, 0, 5000)
    others = [client for client in clients if client not in (target, source)]
    for client in (target, source, *others):  # the others would hear of it only later
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    for client in clients:
        client.close()
