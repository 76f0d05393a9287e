"""Real vLLM with LoRA: every adapter's cache is its own, whatever its name and folder hold."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.telemetry import metrics

from .adapter_folders import make_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def settings(store: Path) -> dict[str, Any]:
    return {
        "host": {"capacity": "64MiB"},
        "tiers": [{"kind": "filesystem", "path": str(store), "min_free": "0B"}],
        "load": {"decide": "always"},
    }


def adapter(folder: Path, number: int, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow to import

    return LoRARequest(f"{folder.name}-{number}", number, str(folder), **more)


def ask(engine: Any, prompt: list[int], lora: Any = None, max_tokens: int = 4) -> Any:
    """An answer: tokens, logprobs, and how much of the prompt was cached."""
    from vllm import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=3, ignore_eos=True, detokenize=False
    )
    [output] = engine.llm.generate(
        [{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=lora
    )
    [said] = output.outputs
    logprobs = [{token: p.logprob for token, p in step.items()} for step in said.logprobs]
    return list(said.token_ids), logprobs, output.num_cached_tokens


def loaded_tokens(engine: Any, tier: str) -> float:
    return sum(
        float(s.value)
        for s in engine.side.stats()
        if s.name == metrics.HIT_TOKENS.name and s.labels == (tier,)
    )


@pytest.fixture(scope="module")
def served(checkpoints: Any, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine for all; each test brings adapters and prompts of its own."""
    store = tmp_path_factory.mktemp("store")
    with serve(checkpoints.of("llama"), settings(store), **OPTIONS) as engine:
        yield engine


@dataclass(frozen=True)
class Swap:
    """An adapter, and how vLLM alone answers 900 tokens with what it is replaced by."""

    model: Path
    adapter: Any
    expected: list[int]

    def replace(self, engine: Any) -> None:
        """Other files in its folder, and vLLM loads them."""
        folder = Path(self.adapter.lora_path)
        make_adapter(folder, self.model, seed=2)
        number = self.adapter.lora_int_id
        engine.llm.llm_engine.add_lora(adapter(folder, number, load_inplace=True))


@pytest.fixture
def swap(checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path) -> Swap:
    model = checkpoints.of("llama")
    red = adapter(make_adapter(tmp_path / "red", model, seed=1), 1)
    blue = adapter(make_adapter(tmp_path / "blue", model, seed=2), 2)
    with serve(model, **OPTIONS) as plain:
        return Swap(model, red, ask(plain, prompt_of(900), blue)[0])


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_every_adapter_restores_what_is_its_own(
    arch: str, checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model, prompt = checkpoints.of(arch), prompt_of(900)
    loras = [
        None,
        adapter(make_adapter(tmp_path / "red", model, seed=1), 1),
        adapter(make_adapter(tmp_path / "blue", model, seed=2), 2),
    ]
    with serve(model, **OPTIONS) as plain:
        expected = [ask(plain, prompt, lora)[0] for lora in loras]
    with serve(model, settings(tmp_path / "store"), **OPTIONS) as engine:
        cold = [ask(engine, prompt, lora) for lora in loras]
        local = [ask(engine, prompt, lora) for lora in loras]
        engine.drop_device_cache()
        from_host = [ask(engine, prompt, lora) for lora in loras]
        in_host = loaded_tokens(engine, "host")
        engine.drop_device_cache()
        assert engine.side.reset()
        from_disk = [ask(engine, prompt, lora) for lora in loras]
        on_disk = loaded_tokens(engine, "filesystem")
        assert not engine.side.hook_faults

    assert [cached for _, _, cached in cold] == [0, 0, 0]
    assert len({str(logprobs) for _, logprobs, _ in local}) == 3, "adapters change the answer"
    assert from_host == from_disk == local
    assert in_host == on_disk == sum(cached for _, _, cached in local) > 0
    assert [tokens for tokens, _, _ in from_host] == expected


def test_other_weights_under_the_same_name_are_not_served_the_old_ones_chunks(
    checkpoints: Any, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model, prompt = checkpoints.of("llama"), prompt_of(900)
    red = adapter(make_adapter(tmp_path / "red", model, seed=1), 1)
    blue = adapter(make_adapter(tmp_path / "blue", model, seed=2), 2)
    with serve(model, settings(tmp_path / "store"), **OPTIONS) as first:
        old_red, old_blue = ask(first, prompt, red), ask(first, prompt, blue)
        first.settle()
    make_adapter(tmp_path / "red", model, seed=3)

    with serve(model, settings(tmp_path / "store"), **OPTIONS) as second:
        new_red, same_blue = ask(second, prompt, red), ask(second, prompt, blue)
        make_adapter(tmp_path / "red", model, seed=1)  # the old one comes back
        second.llm.llm_engine.remove_lora(red.lora_int_id)
        second.drop_device_cache()
        again_red = ask(second, prompt, red)
        assert not second.side.hook_faults

    assert new_red[2] == 0, "computed"
    assert new_red[1] != old_red[1]
    assert same_blue[0] == old_blue[0]
    assert same_blue[2] > 0, "restored after the restart, by its first request"
    assert again_red[0] == old_red[0]
    assert again_red[2] > 0


def test_blocks_of_an_adapter_that_was_replaced_are_not_stored_as_the_new_ones(
    swap: Swap, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """Its files change, and nobody resets vLLM's cache: vLLM itself goes on with the old blocks."""
    prompt, expected = prompt_of(900), swap.expected
    red = swap.adapter
    with serve(swap.model, settings(tmp_path / "store"), **OPTIONS) as engine:
        old = ask(engine, prompt, red)
        swap.replace(engine)
        mixed = ask(engine, prompt, red)
        engine.drop_device_cache()
        after_reset = ask(engine, prompt, red)
        local = ask(engine, prompt, red)
        engine.drop_device_cache()
        restored = ask(engine, prompt, red)
        engine.settle()
        assert not engine.side.hook_faults
    with serve(swap.model, settings(tmp_path / "store"), **OPTIONS) as again:
        restarted = ask(again, prompt, red)

    assert mixed[2] > 0, "vLLM has found the old one's blocks"
    assert after_reset[2] == 0
    assert old[0] != expected == after_reset[0]
    assert restored == local
    assert restored[2] > 0
    assert restarted[0] == expected
    assert restarted[2] > 0


def test_an_adapter_is_asked_for_though_it_was_loaded_before(
    swap: Swap, serve: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """Its blocks have left vLLM's cache one by one; its chunks are still in host memory."""
    prompt, expected = prompt_of(900), swap.expected
    red = swap.adapter
    few = OPTIONS | {"num_gpu_blocks_override": 64, "block_size": 32, "max_model_len": 1024}
    with serve(swap.model, settings(tmp_path / "store"), **few) as engine:
        ask(engine, prompt, red)
        for seed in range(1, 4):
            ask(engine, prompt_of(900, seed=seed))
        engine.settle()
        before = loaded_tokens(engine, "host")
        swap.replace(engine)
        new = ask(engine, prompt, red)
        assert loaded_tokens(engine, "host") == before
        assert not engine.side.hook_faults

    assert new[2] == 0
    assert new[0] == expected


@pytest.mark.usefixtures("plain_copies")
def test_a_load_fails_if_the_adapter_is_replaced_meanwhile(
    swap: Swap, serve: Any, prompt_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    prompt, expected = prompt_of(900), swap.expected
    red = swap.adapter
    with serve(swap.model, settings(tmp_path / "store"), **OPTIONS) as served:
        ask(served, prompt, red)
        served.drop_device_cache()
        gate, engine = threading.Event(), served.llm.llm_engine
        served.hold("load", gate, monkeypatch)
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        engine.add_request("a", {"prompt_token_ids": prompt}, sampling, lora_request=red)
        served.step_until_held("load")
        swap.replace(served)
        gate.set()
        answers = []
        while engine.has_unfinished_requests():
            answers += [output for output in engine.step() if output.finished]
        served.settle()
        assert not served.side.hook_faults
        assert served.side.num_leases == 0

    [answer] = answers
    assert list(answer.outputs[0].token_ids) == expected


@pytest.mark.parametrize(("number", "way"), [(11, "load_inplace"), (12, "request"), (13, "remove")])
def test_an_adapter_that_is_replaced_in_a_running_engine_starts_afresh(
    served: Any, checkpoints: Any, prompt_of: Any, tmp_path: Path, number: int, way: str
) -> None:
    model, prompt = checkpoints.of("llama"), prompt_of(900, seed=number)
    red = adapter(make_adapter(tmp_path / "red", model, seed=1), number)
    old = ask(served, prompt, red)
    served.drop_device_cache()
    make_adapter(tmp_path / "red", model, seed=2)
    anew = adapter(tmp_path / "red", number, load_inplace=True)
    if way == "load_inplace":
        served.llm.llm_engine.add_lora(anew)
    elif way == "remove":
        served.llm.llm_engine.remove_lora(number)
        served.llm.llm_engine.add_lora(red)

    new = ask(served, prompt, anew if way == "request" else red)
    local = ask(served, prompt, red)
    served.drop_device_cache()
    restored = ask(served, prompt, red)

    assert new[2] == 0, "nothing of the old one"
    assert new[1] != old[1]
    assert restored == local
    assert restored[2] > 0
    assert not served.side.hook_faults


def test_what_another_adapter_goes_on_with_is_not_stored_as_the_first_ones(
    served: Any, checkpoints: Any, prompt_of: Any, tmp_path: Path
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    model, engine = checkpoints.of("llama"), served.llm.llm_engine
    red = adapter(make_adapter(tmp_path / "red", model, seed=1), 21)
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": prompt_of(300, seed=21)}
    before = served.side.host_keys()
    engine.add_request("a", prompt, sampling, lora_request=red)
    while served.side.host_keys() == before:
        engine.step()
    stored = served.side.host_keys()
    make_adapter(tmp_path / "red", model, seed=2)
    engine.add_lora(adapter(tmp_path / "red", 21, load_inplace=True))

    while engine.has_unfinished_requests():
        engine.step()
    served.settle()

    assert served.side.host_keys() == stored
    assert not served.side.hook_faults


def test_an_adapter_that_cannot_be_read_is_not_offloaded(
    served: Any, checkpoints: Any, prompt_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstrata.engines.vllm import rank_adapters  # noqa: PLC0415 - needs vLLM

    prompt, before = prompt_of(600, seed=31), served.side.host_keys()
    red = adapter(make_adapter(tmp_path / "red", checkpoints.of("llama"), seed=1), 31)
    monkeypatch.setattr(rank_adapters, "files_digest", lambda path: rank_adapters.UNKNOWN)  # noqa: ARG005

    answers = [ask(served, prompt, red)]
    served.drop_device_cache()
    answers.append(ask(served, prompt, red))
    served.settle()

    assert [cached for _, _, cached in answers] == [0, 0]
    assert served.side.host_keys() == before
    ask(served, prompt)
    served.settle()
    assert served.side.host_keys() > before, "a request without one is"
    assert not served.side.hook_faults


def test_a_request_goes_on_when_no_rank_says_what_its_adapter_is(
    served: Any, checkpoints: Any, prompt_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstrata.engines.vllm import adapters, rank_adapters  # noqa: PLC0415

    monkeypatch.setattr(rank_adapters.RankAdapters, "take_report", lambda self: None)  # noqa: ARG005
    monkeypatch.setattr(adapters, "_PATIENCE_S", 0.2)
    red = adapter(make_adapter(tmp_path / "red", checkpoints.of("llama"), seed=1), 41)
    before = served.side.host_keys()

    tokens, _, cached = ask(served, prompt_of(600, seed=41), red)
    served.settle()

    assert (len(tokens), cached) == (4, 0)
    assert served.side.host_keys() == before
    assert not served.side.hook_faults


def told(answers: dict[str, bytes] | None = None, *, red: bytes | None = None) -> Any:
    """What a rank says: answers by request, and that it has loaded the red adapter."""
    from kvstrata.engines.vllm.rank_adapters import AdapterReport  # noqa: PLC0415

    return AdapterReport(answers or {}, {} if red is None else {"red-1": red})


class Asked:
    """What the scheduler knows about adapters, at a time of ours."""

    def __init__(self, num_ranks: int = 1) -> None:
        from kvstrata.engines.vllm.adapters import Adapters  # noqa: PLC0415

        self.now = 0.0
        self.adapters = Adapters(num_ranks, lambda: self.now)

    def go_on(self, request_id: str, red: Any, weights: bytes | None) -> bytes | None:
        """A request arrives, and is answered; what stands in its keys."""
        assert not self.adapters.arrive(request_id, red)
        assert self.adapters.is_waiting(request_id)
        if weights is None:
            self.now += 100
        else:
            self.adapters.report([told({request_id: weights})])
        assert not self.adapters.is_waiting(request_id)
        assert self.adapters.stop_waiting(request_id)
        return self.adapters.weights_of(request_id)


def test_ranks_must_agree(tmp_path: Path) -> None:
    adapters = Asked(num_ranks=2).adapters
    loras = {name: adapter(tmp_path / name, 1) for name in ("alike", "unlike", "partly")}
    for name, lora in loras.items():
        assert not adapters.arrive(name, lora)
        assert adapters.is_waiting(name)
    assert adapters.take_questions().keys() == {"alike", "unlike", "partly"}
    adapters.report(
        [
            told({"alike": b"1", "unlike": b"1", "partly": b"1"}),
            told({"alike": b"1", "unlike": b"2"}),
        ]
    )

    assert not any(map(adapters.is_waiting, ("alike", "unlike", "partly")))
    assert adapters.weights_of("alike") == b"1"
    assert adapters.weights_of("unlike") is None
    assert adapters.weights_of("partly") is None
    assert adapters.weights_of("without an adapter") == b""


def test_a_name_that_has_stood_for_two_is_left_alone_until_a_reset(tmp_path: Path) -> None:
    asked, red = Asked(), adapter(tmp_path / "red", 1)
    adapters = asked.adapters
    assert asked.go_on("first", red, b"old") == b"old"
    assert adapters.report([told(red=b"old")]) == (False, [])
    assert adapters.report([told(red=b"new")]) == (True, ["first"])
    assert adapters.weights_of("first") is None
    assert asked.go_on("second", red, b"new") is None
    assert adapters.report([told(red=b"new")]) == (False, [])
    adapters.finish("first")
    adapters.reset()

    assert asked.go_on("third", red, b"new") == b"new"
    assert adapters.report([told(red=b"newer")]) == (True, ["second", "third"])


def test_what_ended_before_a_change_is_doubted_too(tmp_path: Path) -> None:
    asked, red = Asked(), adapter(tmp_path / "red", 1)
    asked.go_on("ended", red, b"old")
    assert not asked.adapters.finish("ended")

    assert asked.adapters.report([told(red=b"new")]) == (True, [])


def test_a_change_after_a_reset_counts_while_requests_live(tmp_path: Path) -> None:
    asked, red = Asked(), adapter(tmp_path / "red", 1)
    asked.go_on("living", red, b"old")
    asked.adapters.reset()
    assert asked.adapters.report([told(red=b"new")]) == (True, ["living"])

    assert asked.go_on("later", red, b"new") is None


def test_what_nobody_knows_spoils_a_name_until_a_reset(tmp_path: Path) -> None:
    asked, red = Asked(), adapter(tmp_path / "red", 1)
    assert asked.go_on("first", red, None) is None
    assert asked.go_on("second", red, b"known") is None
    asked.adapters.finish("first")
    asked.adapters.finish("second")
    asked.adapters.reset()

    assert asked.go_on("third", red, b"known") == b"known"


def test_a_request_that_ends_while_it_waits_spoils_nothing(tmp_path: Path) -> None:
    asked, red = Asked(), adapter(tmp_path / "red", 1)
    asked.adapters.arrive("first", red)
    assert asked.adapters.finish("first")
    assert not asked.adapters.take_questions()
    asked.adapters.report([told({"first": b"late"})])

    assert asked.go_on("second", red, b"known") == b"known"
