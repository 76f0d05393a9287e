"""What `/metrics` says is what clients have seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.testing.vllm_server import VllmServer, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.testing.vllm_exam import Exam
    from kvstrata.testing.vllm_metrics import Metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {"capacity": "10MiB"}
"""Host memory for three of the prompts."""


def test_metrics_agree_with_clients(
    make_server: Callable[..., VllmServer], exam: Exam, disk: dict[str, Any]
) -> None:
    server = make_server("metered", disk, host=SMALL)
    with running(server):
        cold = sum(exam.take(server, 0))
        device = sum(exam.take(server, 0))
        forget_device(server)
        host = sum(exam.take(server, 0))
        others = sum(exam.take(server, 1, 2, 3, 4, 5))
        forget_device(server)
        lower = sum(exam.take(server, 0))
        server.settle()
        found = server.metrics()

    assert cold == others == 0
    assert min(device, host, lower) > 0
    num_sent = sum(len(exam.prompts[n]) for n in [0, 0, 0, 0, 1, 2, 3, 4, 5])
    check_sources(
        found,
        {
            "local": device,
            "host": host,
            "filesystem": lower,
            "computed": num_sent - device - host - lower,
        },
    )
    check_vllms_own(found, {"device": device, "host": host, "disk": lower})
    assert found.total("vllm:kvstrata_evictions_total", tier="host") > 0
    assert not found.total("vllm:kvstrata_hook_faults_total")


def test_two_api_servers_count_every_request_once(
    make_server: Callable[..., VllmServer], exam: Exam, disk: dict[str, Any]
) -> None:
    server = make_server("doubled", disk, options=("--api-server-count", "2"))
    numbers = range(len(exam.prompts))
    with running(server):
        assert sum(exam.take(server, *numbers)) == 0
        forget_device(server)
        host = sum(exam.take(server, *numbers))
        server.settle()
        found = server.metrics()

    num_sent = 2 * sum(map(len, exam.prompts))
    assert host > 0
    check_sources(found, {"local": 0, "host": host, "computed": num_sent - host})
    check_vllms_own(found, {"device": 0, "host": host})


def forget_device(server: VllmServer) -> None:
    server.settle()
    assert server.has_reset()


def check_sources(found: Metrics, tokens: dict[str, int]) -> None:
    """Every token of a prompt came from one place."""
    assert found.by("vllm:kvstrata_prompt_tokens_total", "source") == tokens
    below = {tier: n for tier, n in tokens.items() if tier not in ("local", "computed")}
    assert found.by("vllm:kvstrata_hit_tokens_total", "tier") == below
    assert found.total("vllm:kvstrata_miss_tokens_total") == tokens["computed"]
    assert found.total("vllm:kvstrata_lookup_tokens_total") == sum(tokens.values())


def check_vllms_own(found: Metrics, cached: dict[str, int]) -> None:
    """vLLM has counted the same hits, under its names for the places."""
    sources = found.by("vllm:prompt_tokens_cached_by_source_total", "source")
    assert {source: n for source, n in sources.items() if n} == {
        source: n for source, n in cached.items() if n
    }
    external = sum(cached.values()) - cached["device"]
    assert found.total("vllm:external_prefix_cache_hits_total") == external
    assert found.total("vllm:prompt_tokens_cached_total") == sum(cached.values())
