"""Real vLLM: children of a multi connector that hang, raise, lie or cannot work at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from .multi_support import child, connector, drop_device_cache, multi, odd, settle, start, warm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def odds() -> Any:
    """The connectors with peculiarities; vLLM finds them by the path of their module."""
    pytest.importorskip("vllm")
    from . import odd_connectors  # noqa: PLC0415 - needs vLLM

    return odd_connectors


def test_a_hanging_child_delays_by_its_deadline_at_most(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    hanging = {
        "kind": "custom",
        "name": "hanging",
        "store": "kvstrata.testing.hanging_store:HangingStore",
        "options": {"path": str(tmp_path / "store"), "seconds": 30},
    }
    slow = {"tiers": [hanging], "load": {"decide": "always", "deadline": "25s"}}
    children = [
        child("near"),
        child("far", load_weight=2.0, match_deadline="700ms", settings=slow),
    ]
    with serve(checkpoints.of("llama"), None, **multi(*children)) as engine:
        near, far = connector(engine)._children  # noqa: SLF001
        start_s = time.monotonic()
        [cold] = engine.ask(prompt_of(1500))
        cold_s = time.monotonic() - start_s
        for _ in range(50):  # it never settles
            engine.core.step()
        far.connector.reset_cache()  # or it would load at once
        assert engine.core.scheduler.reset_prefix_cache()
        start_s = time.monotonic()
        [restored] = engine.ask(prompt_of(1500))
        restored_s = time.monotonic() - start_s

        assert 0.7 < cold_s < 20
        assert 0.7 < restored_s < 20
        assert far.tally.deadline_misses == 2
        assert near.tally.loads == 1
        assert (cold.cached_tokens, restored.cached_tokens) == (0, 1408)
        assert restored.tokens == cold.tokens


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_children_that_raise_cost_time_only(
    side: str, odds: Any, checkpoints: Any, serve: Any, prompt_of: Any
) -> None:
    raising = [odd(kind, load_weight=20.0 - place) for place, kind in enumerate(odds.RAISING[side])]
    prompt = prompt_of(1500)
    odds.RaisingConnector.armed.clear()
    with serve(checkpoints.of("lfm2"), None, **multi(child("near"), *raising)) as engine:
        local = warm(engine, prompt)
        for num_stopped, hook in enumerate(odds.HOOKS[side], start=1):
            odds.RaisingConnector.armed.add(hook)  # of the child that would load
            [answer] = engine.ask(prompt)
            assert answer.logprobs == local.logprobs, hook
            drop_device_cache(engine)
            stats = connector(engine).child_stats()
            assert sum(s.is_stopped for s in stats.values()) == num_stopped, hook
            assert all(s.pending_loads == 0 for s in stats.values()), hook
        [answer] = engine.ask(prompt)

        settle(engine)
        near = connector(engine).child_stats()["near"]
        assert answer.logprobs == local.logprobs
        assert near.loads > 0
        assert near.loaded_tokens == near.loads * local.cached_tokens
        assert near.faults == 0
        assert engine.core.scheduler.reset_connector_cache()


def test_several_savers_are_waited_for_and_liars_are_not(
    odds: Any, checkpoints: Any, serve: Any, prompt_of: Any
) -> None:
    children = [
        child("near"),
        odd(odds.LateConnector, load_weight=2.0),
        odd(odds.LaterConnector),
        odd(odds.LyingConnector),
    ]
    prompt = prompt_of(1500)
    with serve(checkpoints.of("gemma3"), None, **multi(*children)) as engine:
        local = warm(engine, prompt)
        [restored] = engine.ask(prompt)
        assert engine.core.scheduler.requests, "it is held until it is saved"
        drop_device_cache(engine)

        assert restored.logprobs == local.logprobs
        stats = connector(engine).child_stats()
        assert stats["LateConnector"].loads == 1
        assert stats["LyingConnector"].stray_reports > 0
        assert not any(s.is_stopped for s in stats.values())

        aborted = start(engine, prompt, num_steps=2)  # its load is reported some steps later
        assert aborted in connector(engine)._loads  # noqa: SLF001
        engine.core.abort_requests([aborted])
        drop_device_cache(engine)
        assert not engine.core.scheduler.requests


def test_loads_within_a_step_are_not_taken_for_recurrent_layers(
    odds: Any, checkpoints: Any, serve: Any, prompt_of: Any
) -> None:
    children = [child("near"), odd(odds.SyncConnector, load_weight=2.0)]
    with serve(checkpoints.of("lfm2"), None, **multi(*children)) as engine:
        local = warm(engine, prompt_of(1500))
        [restored] = engine.ask(prompt_of(1500))

        stats = connector(engine).child_stats()
        assert restored.logprobs == local.logprobs
        assert stats["near"].loads == 1
        assert stats["SyncConnector"].unusable_answers > 0
        assert stats["SyncConnector"].hits == 0


def test_vllms_own_connector_loads_within_a_step(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "load_weight": 2,
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    with serve(checkpoints.of("llama"), None, **multi(child("near"), example)) as engine:
        local = warm(engine, prompt_of(1500))
        [restored] = engine.ask(prompt_of(1500))
        assert restored.logprobs == local.logprobs
        assert connector(engine).child_stats()["ExampleConnector"].loads == 1

        drop_device_cache(engine)
        for file in (tmp_path / "example").rglob("*.safetensors"):
            file.write_bytes(b"damaged")
        [recomputed] = engine.ask(prompt_of(1500))
        settle(engine)
        assert recomputed.tokens == local.tokens
        assert connector(engine).child_stats()["ExampleConnector"].is_stopped


@pytest.mark.parametrize(
    ("arch", "children", "message"),
    [
        ("gemma3", [{"kv_connector": "ExampleConnector"}], r"ExampleConnector cannot keep hybrid"),
        (
            "llama",
            [{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24}}],
            r"only supported on CUDA-alike",
        ),
        ("llama", [{"kv_connector": "KVStrataConector"}], r"connectors\[0\].kv_connector.*KVStrataConector"),
        ("llama", [{"kv_connector": "ExampleConnector", "load_wait": 2}], r"load_wait.*load_weight"),
    ],
    ids=["hybrid", "device", "class", "key"],
)  # fmt: skip
def test_children_that_cannot_work_stop_the_start(
    arch: str,
    children: list[dict[str, Any]],
    message: str,
    checkpoints: Any,
    serve: Any,
) -> None:
    with (
        pytest.raises(Exception, match=message),
        serve(checkpoints.of(arch), None, **multi(*children)),
    ):
        pass
