"""Real servers on free loopback ports, for tests: those of the showcase, and Redis as a cluster."""

# redis-py annotates only a part of its methods.
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

from redis import Redis

from kvstrata.showcase.local_servers import (
    HOST,
    ServerProcess,
    free_port,
    redis_server,
    s3_server,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "HOST",
    "ServerProcess",
    "free_port",
    "redis_cluster",
    "redis_server",
    "s3_server",
    "wait_until",
]

_NUM_SLOTS: Final = 16384


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
