"""Whatever is wrong with a model, an option or a prompt, the error says what to change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstrata.engine import ConnectorParts, Engine, EngineOptions, SamplingParams
from kvstrata.engine.ranks import RankProcesses
from kvstrata.engine.tiny import make_tiny
from kvstrata.errors import (
    ClosedError,
    ConfigError,
    EngineError,
    KVStrataError,
    LayoutError,
    ModelError,
    RequestError,
)
from kvstrata.testing.memory_connector import MemoryScheduler, MemoryWorker, UnwillingWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "llama"
    make_tiny("llama", folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A model that a test may break."""
    return shutil.copytree(sound, tmp_path / "llama")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


BROKEN_CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("{", "config.json cannot be read: Expecting"),
    "not text": (b"\xff\xfe{", "config.json cannot be read: 'utf-8' codec"),
    "not an object": ("[1, 2]", "config.json holds list; expected a JSON object"),
    "empty": ("{}", r"architectures is \[\]; accepted: LlamaForCausalLM, "),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS)
def test_a_broken_config(folder: Path, text: str | bytes, message: str) -> None:
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ModelError, match=message):
        Engine(folder)


CHANGED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"architectures is \['GPT2LMHeadModel'\]; accepted: LlamaForCausalLM, ",
    ),
    "no list of architectures": (
        {"architectures": 7},
        "architectures is 7; accepted: a list of names",
    ),
    "missing key": ({"hidden_size": "absent"}, "missing required field `hidden_size`"),
    "wrong type": ({"hidden_size": [64]}, r"Expected `int`, got `array` - at `\$.hidden_size`"),
    "impossible size": ({"hidden_size": -64}, "config.json describes no model that can be built"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "config.json describes no model"),
    "rope as a list": ({"rope_parameters": [1]}, "config.json describes no model"),
    "unknown rope": (
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope_type is 'dynamic'; accepted: default, linear, llama3, yarn",
    ),
    "no vocabulary": ({"vocab_size": "absent"}, "missing required field `vocab_size`"),
    "quantised": (
        {"quantization_config": {"bits": 4}},
        "quantization_config is set, and quantised weights are not supported",
    ),
    "half precision": (
        {"dtype": "float16"},
        "dtype is 'float16', which no model runs in; choose one of the dtypes float32, bfloat16",
    ),
    "nonsense as dtype": ({"dtype": ["float32"]}, r"dtype is \['float32'\], which no model runs"),
    "length is no number": (
        {"max_position_embeddings": "long"},
        "max_position_embeddings is 'long'; accepted: a whole number above zero",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CHANGED_CONFIGS.values(), ids=CHANGED_CONFIGS)
def test_a_config_that_cannot_be_used(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        Engine(folder)


def test_numbers_written_as_text_are_numbers(folder: Path) -> None:
    change_config(folder, vocab_size="256", max_position_embeddings="512")
    with Engine(folder, EngineOptions(cache_capacity="4MiB")) as engine:
        assert len(engine.generate([[255]], SamplingParams(max_tokens=2))[0].tokens) == 2


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; expected a model directory"):
        Engine(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/config\.json cannot be read"):
        Engine(tmp_path / "file")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; expected the model's w"):
        Engine(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 100_000])
def test_truncated_weights(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Engine(folder)


def test_a_missing_tensor(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(WEIGHT))
    with pytest.raises(ModelError, match=rf"tensor '{WEIGHT}' of shape \(64, 64\) is missing in"):
        Engine(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({WEIGHT: torch.zeros(32, 64)}))
    message = rf"tensor '{WEIGHT}' .* has shape \(32, 64\); config.json leads to \(64, 64\)"
    with pytest.raises(ModelError, match=message):
        Engine(folder)


def test_a_tensor_of_another_kind(folder: Path) -> None:
    whole = torch.zeros(64, 64, dtype=torch.int8)
    change_weights(folder, lambda weights: weights.update({WEIGHT: whole}))
    with pytest.raises(ModelError, match=rf"tensor '{WEIGHT}' .* has dtype torch.int8; accepted:"):
        Engine(folder)


BROKEN_INDICES = {
    "not JSON": ("{", "index.json cannot be read: Input data was truncated"),
    "no map": ("{}", "index.json cannot be read: .*missing required field `weight_map`"),
    "a list as map": ('{"weight_map": ["x"]}', "Expected `object`, got `array`"),
    "numbers for files": ('{"weight_map": {"x": 1}}', "Expected `str`, got `int`"),
    "nothing in the map": ('{"weight_map": {}}', "tensor 'model.embed_tokens.weight' .*is missing"),
    "a file that is not there": (
        '{"weight_map": {"model.embed_tokens.weight": "other.safetensors"}}',
        "other.safetensors is missing; expected the model's weights",
    ),
    "a file without the tensor": (
        '{"weight_map": {"model.embed_tokens.weight": "empty.safetensors"}}',
        "tensor 'model.embed_tokens.weight' cannot be read from empty.safetensors",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_INDICES.values(), ids=BROKEN_INDICES)
def test_a_broken_index(folder: Path, text: str, message: str) -> None:
    save_file({"something": torch.zeros(1)}, folder / "empty.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        Engine(folder)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[KVStrataError], str]] = {
    "dtype": ({"dtype": "int4"}, ModelError, "dtype is 'int4'; accepted: auto, float32, bfloat16"),
    "no such device": ({"device": "gpu"}, ModelError, "device is 'gpu'; there are here: cpu"),
    "device that keeps nothing": ({"device": "meta"}, ModelError, "device is 'meta'; there are"),
    "capacity too small": (
        {"cache_capacity": "4KiB"},
        LayoutError,
        "a KV block takes 12288B and at least 2 are needed: raise it to 24576B or more",
    ),
    "capacity beyond memory": (
        {"cache_capacity": "4096TiB"},
        LayoutError,
        "cannot be allocated on cpu: lower cache_capacity or num_blocks",
    ),
    "capacity that is no size": (
        {"cache_capacity": "lots"},
        ConfigError,
        "cache_capacity: 'lots' is not understood; accepted: a number with a unit",
    ),
    "capacity without a unit": ({"cache_capacity": "1000"}, ConfigError, "is not a size; accepted"),
    "one block": ({"num_blocks": 1}, ConfigError, "num_blocks: it is 1; accepted: at least 2"),
    "no ranks": ({"num_ranks": 0}, ConfigError, "num_ranks: it is 0; accepted: at least 1"),
    "no tokens": ({"max_step_tokens": 0}, ConfigError, "max_step_tokens: it is 0; accepted"),
    "none running": ({"max_running": 0}, ConfigError, "max_running: it is 0; accepted"),
    "no state": ({"state_tokens": 0}, ConfigError, "state_tokens: it is 0; accepted"),
    "too long": (
        {"max_request_tokens": 5000},
        ModelError,
        "max_request_tokens is 5000, but the model's max_position_embeddings is 4096",
    ),
}


@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_an_option_that_cannot_be(
    sound: Path, options: dict[str, Any], kind: type[KVStrataError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Engine(sound, EngineOptions(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there(sound: Path, device: str) -> None:
    with pytest.raises(ModelError, match=f"device is '{device}'; there are here: cpu"):
        Engine(sound, EngineOptions(device=device))


BAD_REQUESTS: dict[str, tuple[Any, SamplingParams, str]] = {
    "empty": ([], SamplingParams(), "it has no tokens; a prompt needs at least one"),
    "unknown token": ([1, 256], SamplingParams(), "token 256 is not in the vocabulary; accepted"),
    "negative token": ([-1], SamplingParams(), "accepted: 0 to 255"),
    "no token": (["one"], SamplingParams(), "a prompt is a list of token ids"),
    "a number": (7, SamplingParams(), "a prompt is a list of token ids"),
    "too long for the model": (
        [1] * 4090,
        SamplingParams(),
        "4090 prompt tokens and 16 for the answer, but max_request_tokens is 4096: shorten it",
    ),
    "too long for the pool": (
        [1] * 200,
        SamplingParams(),
        "216 tokens may need 14 blocks, but the pool has 9: raise num_blocks to 15, or shorten it",
    ),
    "no answer": ([1], SamplingParams(max_tokens=0), "max_tokens is 0, but must be at least 1"),
    "cold": ([1], SamplingParams(temperature=-1.0), "temperature is -1.0; accepted: 0 or more"),
    "no temperature": ([1], SamplingParams(temperature=float("nan")), "temperature is nan"),
}


@pytest.mark.parametrize(("prompt", "sampling", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_that_cannot_be_served(
    sound: Path,
    prompt: Any,  # noqa: ANN401 - that is what is wrong with some
    sampling: SamplingParams,
    message: str,
) -> None:
    with Engine(sound, EngineOptions(num_blocks=10)) as engine:
        with pytest.raises(RequestError, match=f"request 'request-0': .*{message}"):
            engine.generate([prompt], sampling)
        assert len(engine.generate([[1]], SamplingParams(max_tokens=2))[0].tokens) == 2


def test_an_id_in_use(sound: Path) -> None:
    with Engine(sound, EngineOptions(num_blocks=10)) as engine:
        engine.add_request([1], request_id="mine")
        with pytest.raises(RequestError, match="request 'mine': this id is in use; take another"):
            engine.add_request([2], request_id="mine")


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture 'gpt2' is not known; known: llama, mistral"):
        make_tiny("gpt2", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_tiny_model_overwrites_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds a model already; expected a new or empty folder"):
        make_tiny("llama", folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="holds a model already"):
        make_tiny("llama", folder)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file cannot be written to"):
        make_tiny("llama", tmp_path / "file")


class BrokenWorker(MemoryWorker):
    """Fails in its first step."""

    def start_step(self, message: bytes) -> None:  # noqa: ARG002 - it fails before
        raise OSError("no space")


def test_a_worker_half_that_fails_ends_the_engine(sound: Path) -> None:
    parts = ConnectorParts(MemoryScheduler, BrokenWorker)
    with Engine(sound, EngineOptions(num_blocks=10), parts) as engine:
        with pytest.raises(EngineError, match=r"rank 0 failed: OSError\('no space'\)"):
            engine.generate([[1]])
        with pytest.raises(ClosedError):
            engine.generate([[1]])


def rank_pids(engine: Engine) -> list[int]:
    ranks = engine._ranks  # noqa: SLF001 - the test kills them
    assert isinstance(ranks, RankProcesses)
    return [process.pid for process in ranks._processes if process.pid]  # noqa: SLF001


def is_gone(pid: int) -> bool:
    """Neither alive nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_ranks_that_cannot_share_the_heads(sound: Path) -> None:
    message = "num_key_value_heads is 2, which 4 ranks cannot share evenly"
    with pytest.raises(ModelError, match=message):
        Engine(sound, EngineOptions(num_ranks=4))


@pytest.mark.slow
def test_a_broken_model_is_refused_by_ranks_too(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(WEIGHT))
    with pytest.raises(ModelError, match=f"tensor '{WEIGHT}'"):
        Engine(folder, EngineOptions(num_ranks=2))


@pytest.mark.slow
def test_a_rank_that_cannot_start_is_named(sound: Path) -> None:
    parts = ConnectorParts(MemoryScheduler, UnwillingWorker)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 failed: OSError\('no memory'\)"):
        Engine(sound, EngineOptions(num_ranks=2), parts)
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_engine(sound: Path, victim: int) -> None:
    engine = Engine(sound, EngineOptions(num_ranks=2, num_blocks=300))
    pids = rank_pids(engine)
    stream = engine.stream([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2_000))
    for _ in range(10):
        next(stream)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()

    with pytest.raises(EngineError, match=rf"rank {victim} died \(killed by SIGKILL\)"):
        list(stream)

    assert time.monotonic() - start < 30
    with pytest.raises(ClosedError):
        engine.step()
    assert all(map(is_gone, pids))
    engine.close()
