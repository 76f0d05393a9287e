"""Two servers at once: what one has stored, the other restores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.testing.servers import HOST, redis_server
from kvstrata.testing.vllm_server import VllmServer, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstrata.testing.vllm_exam import Exam

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WHOLE_BLOCKS = 1408
"""Tokens of a prompt that can be restored."""


def test_servers_share_a_directory(
    make_server: Callable[..., VllmServer], exam: Exam, disk: dict[str, Any]
) -> None:
    exchange(make_server("first", disk), make_server("second", disk), exam, "filesystem")


def test_servers_share_a_valkey_server(
    make_server: Callable[..., VllmServer], exam: Exam, tmp_path: Path
) -> None:
    with redis_server(tmp_path) as valkey:
        tier = {"kind": "valkey", "url": f"valkey://{HOST}:{valkey.port}/0"}
        exchange(make_server("first", tier), make_server("second", tier), exam, "valkey")


def exchange(first: VllmServer, second: VllmServer, exam: Exam, tier: str) -> None:
    """Each stores prompts that the other has never seen, and restores the other's."""
    with running(first, second):
        assert exam.take(first, 0, 1) == [0, 0]
        assert exam.take(second, 2, 3) == [0, 0]
        first.settle()
        second.settle()

        assert exam.take(second, 0, 1) == [WHOLE_BLOCKS, WHOLE_BLOCKS]
        assert exam.take(first, 2, 3) == [WHOLE_BLOCKS, WHOLE_BLOCKS]

        for server in (first, second):
            server.settle()
            found = server.metrics()
            assert found.by("vllm:kvstrata_hit_tokens_total", "tier") == {tier: 2 * WHOLE_BLOCKS}
            assert not found.total("vllm:kvstrata_hook_faults_total")
            assert not server.tracebacks
