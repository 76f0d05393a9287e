"""A server that is killed while it stores leaves a directory that the next one can use."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.testing.vllm_server import VllmServer, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.testing.vllm_exam import Exam

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_server_restarts_on_its_directory(
    make_server: Callable[..., VllmServer], exam: Exam, disk: dict[str, Any]
) -> None:
    server = make_server("killed", disk)
    with running(server), ThreadPoolExecutor(len(exam.prompts)) as clients:
        asked = [clients.submit(server.ask, prompt, 400) for prompt in exam.prompts]
        server.wait_until(lambda: bool(stored(disk)))
        server.kill()
        failures = [request.exception(timeout=60) for request in asked]
    left = stored(disk)

    with running(server):
        hits = exam.take(server, *range(len(exam.prompts)))
        server.settle()
        found = server.metrics()

    assert all(isinstance(failure, OSError | http.client.HTTPException) for failure in failures)
    assert sum(hits) == found.total("vllm:kvstrata_hit_tokens_total", tier="filesystem") > 0
    assert len(stored(disk)) > len(left), "it was killed when all was stored"
    assert not found.total("vllm:kvstrata_tier_faults_total")
    assert not found.total("vllm:kvstrata_hook_faults_total")


def stored(disk: dict[str, Any]) -> list[Path]:
    return sorted(Path(disk["path"]).glob("namespaces/*/*/*"))
