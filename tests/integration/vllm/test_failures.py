"""Real vLLM: restarts, small pools, damaged stores and slow tiers cost time, never an answer."""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "host": {"capacity": "64MiB"},
        "tiers": [{"kind": "filesystem", "path": str(folder), "min_free": "0B"}],
        "load": {"decide": "always", "deadline": "5s"},
        **changes,
    }


@pytest.mark.parametrize("arch", ["lfm2", "gemma3"])
def test_a_restarted_engine_finds_the_disk_store(
    arch: str,
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of(arch), settings(tmp_path / "store")) as first:
        [cold] = first.ask(prompt)
        first.settle()

    with serve(checkpoints.of(arch), settings(tmp_path / "store")) as second:
        [restored] = second.ask(prompt)

    assert restored.cached_tokens > 1000
    assert restored.tokens == cold.tokens


def test_a_store_of_other_weights_is_not_used(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of("llama"), settings(tmp_path / "store")) as first:
        first.ask(prompt)
        first.settle()
    files = sorted((tmp_path / "store").glob("namespaces/*/*/*"))

    with serve(checkpoints.of("llama", seed=1), settings(tmp_path / "store")) as second:
        [answer] = second.ask(prompt)
        second.settle()

    assert files
    assert answer.cached_tokens == 0
    assert all(file.exists() for file in files)


def test_damaged_files_cost_a_recompute(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    with serve(checkpoints.of("lfm2"), settings(tmp_path / "store")) as served:
        [cold] = served.ask(prompt)
        served.drop_device_cache()
        served.side.reset()
        for number, file in enumerate(sorted((tmp_path / "store").glob("namespaces/*/*/*"))):
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw if number % 2 else raw[: len(raw) // 2])

        [answer] = served.ask(prompt)

        assert answer.cached_tokens == 0
        assert answer.tokens == cold.tokens
        served.drop_device_cache()


def test_a_hanging_tier_costs_its_deadline(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
) -> None:
    prompt = prompt_of(1500)
    hanging = {
        "kind": "custom",
        "name": "hanging",
        "store": "kvstrata.testing.hanging_store:HangingStore",
        "options": {"path": str(tmp_path / "store"), "seconds": 30},
    }
    changes = {"tiers": [hanging], "load": {"decide": "always", "deadline": "1s"}}
    with serve(checkpoints.of("llama"), settings(tmp_path / "store", **changes)) as served:
        start = time.monotonic()
        [answer] = served.ask(prompt)
        waited_s = time.monotonic() - start

    assert answer.cached_tokens == 0
    assert waited_s < 20  # far less than the tier would take


def test_a_full_disk_costs_nothing_but_its_hits(
    checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    prompt = prompt_of(1500)
    full = {"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "1000TiB"}
    with serve(checkpoints.of("lfm2"), settings(tmp_path, tiers=[full])) as served:
        [cold] = served.ask(prompt)
        served.drop_device_cache()
        [from_host] = served.ask(prompt)
        served.drop_device_cache()
        served.side.reset()
        [computed] = served.ask(prompt)

    assert from_host.cached_tokens > 1000
    assert computed.cached_tokens == 0
    assert cold.tokens == from_host.tokens == computed.tokens


@pytest.mark.usefixtures("plain_copies")
@pytest.mark.parametrize("held", ["read", "load"], ids=["promotion", "copy"])
def test_an_abort_while_a_request_waits_leaves_nothing_behind(
    held: str,
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    prompt = prompt_of(1500)
    with serve(checkpoints.of("gemma3"), settings(tmp_path / "store")) as served:
        [cold] = served.ask(prompt)
        served.drop_device_cache()
        if held == "read":
            served.side.reset()
        gate = threading.Event()
        served.hold(held, gate, monkeypatch)
        engine = served.llm.llm_engine
        engine.add_request("one", {"prompt_token_ids": prompt}, SamplingParams(detokenize=False))
        served.step_until_held(held)
        engine.abort_request(["one"])
        for _ in range(20):
            engine.step()
        gate.set()
        served.settle()

        [again] = served.ask(prompt)
        assert again.tokens == cold.tokens
        served.drop_device_cache()
        assert served.side.num_leases == 0
        assert not served.side.hook_faults


class ToldAs:
    """Counts preemptions, and tells the connector of them as one of vLLM's model runners is told.

    The second runner sees requests that start again as new ones; it does not run on a CPU.
    """

    def __init__(self, connector: Any, runner: str) -> None:
        self._build = connector.build_connector_meta
        self._runner = runner
        self.num_preempted = self.num_resumed = 0
        connector.build_connector_meta = self

    def __call__(self, output: Any) -> Any:
        self.num_preempted += len(output.preempted_req_ids or ())
        self.num_resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        return self._build(self._as_new(output) if self._runner == "second" else output)

    def _as_new(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        new, rest = list(output.scheduled_new_reqs), []
        for place, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                new.append(a_new_request(name, cached.num_computed_tokens[place]))
            else:
                rest.append(place)
        kept = replace(
            cached,
            req_ids=[cached.req_ids[place] for place in rest],
            resumed_req_ids=set(),
            num_computed_tokens=[cached.num_computed_tokens[place] for place in rest],
        )
        return replace(output, scheduled_new_reqs=new, scheduled_cached_reqs=kept)


def a_new_request(name: str, num_computed_tokens: int) -> Any:
    from vllm.v1.core.sched.output import NewRequestData  # noqa: PLC0415

    facts = dict.fromkeys(field.name for field in fields(NewRequestData))
    return NewRequestData(**facts | {"req_id": name, "num_computed_tokens": num_computed_tokens})


@pytest.mark.parametrize(
    ("mode", "runner"), [("eager", "first"), ("lazy", "first"), ("eager", "second")]
)
def test_preemption_under_a_tiny_pool(
    mode: str, runner: str, checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    prompts = [prompt_of(700, seed=seed) for seed in range(4)]
    with serve(checkpoints.of("gemma3")) as plain:
        expected = [plain.ask(prompt, max_tokens=150)[0].tokens for prompt in prompts]
    tiny = settings(tmp_path / "store", store={"mode": mode})
    options = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 512}

    with serve(checkpoints.of("gemma3"), tiny, **options) as served:
        told = ToldAs(served.core.scheduler.connector, runner)
        for _ in range(2):
            answers = served.ask(*prompts, max_tokens=150)
            assert [answer.tokens for answer in answers] == expected
        served.drop_device_cache()
        assert not served.side.hook_faults
        assert served.side.num_leases == 0
    assert told.num_preempted > 0
    assert told.num_resumed > 0


def test_a_wrong_setting_stops_the_start(checkpoints: Any, serve: Any, tmp_path: Path) -> None:
    wrong = settings(tmp_path / "store") | {"hots": {}}

    with pytest.raises(Exception, match=r"hots.*host"), serve(checkpoints.of("llama"), wrong):
        pass
