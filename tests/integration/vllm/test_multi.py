"""Real vLLM: several connectors as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from .multi_support import child, connector, multi, settle, warm

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", params=["lfm2", "llama"])
def served(
    request: pytest.FixtureRequest,
    checkpoints: Any,
    serve: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("stores")
    children = [child("near", folder / "near"), child("far", folder / "far", load_weight=2.0)]
    options = multi(*children) | {"disable_log_stats": False}
    with serve(checkpoints.of(request.param), None, **options) as engine:
        yield engine


def test_a_restore_is_what_a_local_hit_is(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(1500)
    local = warm(served, prompt)

    [restored] = served.ask(prompt)

    assert restored.cached_tokens == local.cached_tokens
    assert restored.logprobs == local.logprobs


def test_the_heavier_of_two_loads_and_both_are_counted(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(1400, seed=1)
    local = warm(served, prompt)
    before = connector(served).child_stats()

    served.ask(prompt)

    settle(served)
    after = connector(served).child_stats()
    assert {name: after[name].loads - before[name].loads for name in after} == {"near": 0, "far": 1}
    assert after["far"].loaded_tokens - before["far"].loaded_tokens == local.cached_tokens
    for name, stats in after.items():
        assert stats.queries - before[name].queries == 1
        assert stats.hit_tokens - before[name].hit_tokens == local.cached_tokens
        assert stats.pending_loads == stats.faults == stats.stray_reports == 0


def test_a_child_that_forgets_leaves_it_to_the_other(served: Any, prompt_of: Any) -> None:
    prompt = prompt_of(1300, seed=2)
    local = warm(served, prompt)
    near, far = connector(served)._children  # noqa: SLF001
    assert far.connector.reset_cache()
    before = near.tally.loads, far.tally.loads

    [restored] = served.ask(prompt)

    settle(served)
    assert (near.tally.loads, far.tally.loads) == (before[0] + 1, before[1])
    assert restored.logprobs == local.logprobs


def test_numbers_of_two_children_of_one_class_stay_apart(served: Any, prompt_of: Any) -> None:
    from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

    prompt = prompt_of(1200, seed=3)
    local = warm(served, prompt)
    served.ask(prompt)
    settle(served)
    served.ask(prompt_of(20))  # numbers are shown with the outputs of requests

    def shown(name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    stats = connector(served).child_stats()
    for name in ("near", "far"):
        assert shown("vllm:kvstrata_child_queries_total", child=name) == stats[name].queries
        assert shown("vllm:kvstrata_child_hit_tokens_total", child=name) == stats[name].hit_tokens
        assert shown("vllm:kvstrata_child_pending_loads", child=name) == 0
        assert shown("vllm:kvstrata_lookups_total", connector=name) > 0
    loaded = [shown("vllm:kvstrata_hit_tokens_total", connector=n) for n in ("near", "far")]
    assert loaded[1] >= local.cached_tokens
    assert loaded[0] != loaded[1]


def test_numbers_cross_process_borders(
    served: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bytes] = []
    take = connector(served).get_kv_connector_stats

    def take_and_send() -> Any:
        stats = take()
        if stats is not None:
            taken.append(msgspec.msgpack.encode(stats.to_dict()))
        return stats

    monkeypatch.setattr(connector(served), "get_kv_connector_stats", take_and_send)
    for seed in (4, 5):
        served.ask(prompt_of(1000, seed=seed))
        settle(served)

    build = type(connector(served)).build_kv_connector_stats
    total = build()
    assert total.is_empty()
    for raw in taken:
        total = total.aggregate(build(msgspec.msgpack.decode(raw)))
    numbers = total.reduce()
    assert numbers["near.queries"] == numbers["far.queries"] == 2
    assert numbers["near.lookups"] == numbers["far.lookups"] == 2
