"""Times vLLM on a GPU: restores from host memory beside computing and beside its own connector.

Three models' shapes with random weights; a local hit is what is left when a load costs nothing.

    python benchmarks/vllm_gpu.py --out FOLDER [--models llama-8b,...] [--modes eager,graphs]

Every engine runs in a process of its own and leaves one JSON file; `summary.json` puts them
together. Engines may start side by side, which takes minutes; they are timed one after another.
Restored bytes must equal those that were computed, logprobs after a restore those after a local
hit, and tokens those of an engine without a connector, after a hit of its own; all three are in the
results.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HOST_BYTES = 16 * 2**30
CACHE_BYTES = 10 * 2**30
"""On the GPU, of every engine: several have to fit."""
LENGTHS = (4_096, 32_768)
NUM_PROMPTS = 1
"""Of each length."""
NUM_RESTORES = 5
"""Of each prompt."""
CHECKED_TOKENS = 6 * 768 + 1
"""The longest local hit and the longest restore end at the same token: blocks have 16 or 528
tokens, chunks 128, 192, 256 or 528."""
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
"""Every fourth of the sizes that vLLM captures by itself, which takes too long here."""
START_LIMIT_S = 240.0
VOCABULARY = 32_000

COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65_536,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rope_theta": 500_000.0,
    },
    "gemma3-4b": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(34)
        ],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    "granite-4-h-micro": COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
        "hidden_act": "silu",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
    },
}

KVSTRATA = {
    "kv_connector": "KVStrataConnector",
    "kv_connector_module_path": "kvstrata.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "host": {"capacity": f"{HOST_BYTES // 2**30}GiB"},
        "load": {"decide": "always"},
    },
}
NATIVE = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
}
CONNECTORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "kvstrata": KVSTRATA,
    "native": NATIVE,
}


class Served:
    """One engine with weights that matter."""

    def __init__(self, model: Path, mode: str, connector: str) -> None:
        from vllm import LLM  # noqa: PLC0415 - slow to import

        self.llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=mode == "eager",
            compilation_config=None if mode == "eager" else {"cudagraph_capture_sizes": GRAPHS},
            max_model_len=36_000,
            gpu_memory_utilization=0.1,
            enable_prefix_caching=True,
            seed=0,
            kv_transfer_config=CONNECTORS[connector],
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        self.llm.apply_model(draw_weights)
        self.core = self.llm.llm_engine.engine_core.engine_core

    def ask(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """One answer, with its scores and its seconds."""
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=3, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        [output] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        [answer] = output.outputs
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [{str(k): v.logprob for k, v in d.items()} for d in answer.logprobs],
            "cached_tokens": output.num_cached_tokens,
            "ms": seconds * 1e3,
        }

    def drop_device_cache(self) -> None:
        """Let stores end, then forget every prefix on the device."""
        connector = self.core.scheduler.connector
        for turn in range(20_000):
            self.core.step()
            if turn > 20 and not (connector and connector.has_pending_push_work()):  # noqa: PLR2004
                break
            time.sleep(0.001)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("blocks are still held")

    def cached_bytes(self) -> dict[tuple[int, bytes], set[bytes]]:
        """The content of every block that can be found now; with our connector only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        side: Any = self.core.scheduler.connector._scheduler_side  # noqa: SLF001
        connector: Any = get_kv_transfer_group()
        groups = side._geometry.groups  # noqa: SLF001
        views = connector._worker_side._memory.copies._views  # noqa: SLF001
        contents: dict[tuple[int, bytes], set[bytes]] = {}
        for block in map(side._context.get_block, range(len(side._context._pool.blocks))):  # noqa: SLF001
            if block.block_hash is None or block.is_null:
                continue
            size = groups[block.group_id].group.rows_per_block
            rows = range(block.block_id * size, (block.block_id + 1) * size)
            payload = views.gather(block.group_id, rows).cpu().numpy().tobytes()
            contents.setdefault((block.group_id, block.block_hash), set()).add(payload)
        return contents


def draw_weights(model: Any) -> None:  # noqa: ANN401
    """Weights by which every token matters to the next: those of a dummy load are nearly zero."""
    import torch  # noqa: PLC0415

    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            elif "norm" in name:
                weight.normal_(1, 0.1, generator=generator)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random tokens."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_tokens,), generator=generator).tolist()


def check(served: Served, connector: str) -> dict[str, Any]:
    """Whether a restore gives what a local hit gives, and a prompt that differs does not."""
    prompt = prompt_of(CHECKED_TOKENS, seed=1)
    other = [*prompt[:100], prompt[100] % 1000 + 3, *prompt[101:]]
    cold = served.ask(prompt, max_tokens=8)
    local = served.ask(prompt, max_tokens=8)
    computed = served.cached_bytes() if connector == "kvstrata" else {}
    served.drop_device_cache()
    again = served.ask(prompt, max_tokens=8)
    restored = served.cached_bytes() if connector == "kvstrata" else {}
    common = computed.keys() & restored.keys()
    return {
        "local_tokens": local["tokens"],
        "cached_tokens": [local["cached_tokens"], again["cached_tokens"]],
        "logprobs_equal_local": again["logprobs"] == local["logprobs"],
        "tokens_equal_cold": again["tokens"] == cold["tokens"],
        "restored_tokens": again["tokens"],
        "blocks_compared": len(common),
        "blocks_equal": sum(restored[key] <= computed[key] for key in common),
        "one_token_matters": served.ask(other, max_tokens=8)["logprobs"] != cold["logprobs"],
    }


def measure(served: Served) -> list[dict[str, Any]]:
    """Milliseconds to the first token: cold, with a local hit, restored."""
    rows = []
    served.ask(prompt_of(LENGTHS[-1], seed=99))
    for length in LENGTHS:
        times: dict[str, list[float]] = {"cold": [], "local": [], "restored": []}
        restored_tokens = 0
        for seed in range(NUM_PROMPTS):
            prompt = prompt_of(length, seed=100 * length + seed)
            times["cold"].append(served.ask(prompt)["ms"])
            served.ask(prompt)
            times["local"].append(served.ask(prompt)["ms"])
            for _ in range(NUM_RESTORES):
                served.drop_device_cache()
                answer = served.ask(prompt)
                times["restored"].append(answer["ms"])
                restored_tokens = answer["cached_tokens"]
        row = {name: round(statistics.median(ms), 1) for name, ms in times.items() if ms}
        rows.append({"tokens": length, "restored_tokens": restored_tokens, **row})
    return rows


class Turns:
    """Engines that were started side by side are timed one by one, once all of them stand.

    Args:
        folder: where they meet.
        num_engines: how many there are; 0: nothing is timed.
    """

    def __init__(self, folder: Path, num_engines: int) -> None:
        self._folder = folder
        self._num_engines = num_engines
        self.are_timed = num_engines > 0

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for the others to stand, and for those that are before."""
        (self._folder / f"{os.getpid()}.stands").touch()
        end = time.monotonic() + START_LIMIT_S  # one may have failed
        while time.monotonic() < end and self._num_standing < self._num_engines:
            time.sleep(0.1)
        with (self._folder / "turn.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def _num_standing(self) -> int:
        return len(list(self._folder.glob("*.stands")))


def run_one(out: Path, turns: Turns, model: str, mode: str, connector: str) -> None:
    """One engine, from start to results."""
    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415

    folder = out / f"model-{model}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    served = Served(folder, mode, connector)
    groups = [
        f"{type(g.kv_cache_spec).__name__}/{g.kv_cache_spec.block_size}/{len(g.layer_names)}"
        for g in served.core.scheduler.kv_cache_config.kv_cache_groups
    ]
    checked = check(served, connector)
    with turns.mine():
        times = measure(served) if turns.are_timed and connector != "none" else []
    result = {
        "model": model,
        "mode": mode,
        "connector": connector,
        "groups": groups,
        "check": checked,
        "times_ms": times,
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    (out / f"{model}-{mode}-{connector}.json").write_text(json.dumps(result, indent=1))


Name = tuple[str, str, str]
"""An engine: model, mode, connector."""


def run_all(out: Path, names: list[Name], at_once: int, *, are_timed: bool) -> None:
    """Each engine in its own process, so many at once; one that fails is told of and left out."""
    for first in range(0, len(names), at_once):
        batch = names[first : first + at_once]
        with tempfile.TemporaryDirectory() as folder:
            running = [Running(name, out, f"{folder}:{len(batch) * are_timed}") for name in batch]
            for engine in running:
                engine.wait_and_tell()
    results = [json.loads(path.read_text()) for path in sorted(out.glob("*-*-*.json"))]
    compare_with_alone(results)
    (out / "summary.json").write_text(json.dumps(results, indent=1))
    for result in results:
        print(result["model"], result["mode"], result["connector"], result["check"])  # noqa: T201
        for row in result["times_ms"]:
            print("   ", row)  # noqa: T201


class Running:
    """An engine in a process of its own.

    Args:
        name: which one.
        out: where it leaves its results.
        turns: where it meets the others, and how many they are.
    """

    def __init__(self, name: Name, out: Path, turns: str) -> None:
        self._name = " ".join(name)
        self._start = time.monotonic()
        command = [sys.executable, __file__, "--out", str(out), "--turns", turns, "--one", *name]
        self._process = subprocess.Popen(command)  # noqa: S603 - this script

    def wait_and_tell(self) -> None:
        """Wait for its end, which is forced after a while."""
        try:
            code = self._process.wait(timeout=START_LIMIT_S + 100)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        seconds = time.monotonic() - self._start
        print(f"{self._name}: exit {code}, {seconds:.0f} s", flush=True)  # noqa: T201


def compare_with_alone(results: list[dict[str, Any]]) -> None:
    """Put into every check whether a restore was answered as by an engine without a connector."""
    alone = {
        (result["model"], result["mode"]): result["check"]["local_tokens"]
        for result in results
        if result["connector"] == "none"
    }
    for result in results:
        expected = alone.get((result["model"], result["mode"]))
        if expected is not None and result["connector"] != "none":
            check = result["check"]
            check["tokens_equal_alone"] = check["restored_tokens"] == expected


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default="eager,graphs")
    parser.add_argument("--connectors", default=",".join(CONNECTORS))
    parser.add_argument("--engines", help="MODEL/MODE/CONNECTOR,... instead of all of those")
    parser.add_argument("--at-once", type=int, default=3, help="engines that start side by side")
    parser.add_argument("--checks-only", action="store_true", help="time nothing")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "MODE", "CONNECTOR"))
    parser.add_argument("--turns", help="FOLDER:COUNT, for one of several engines")
    options = parser.parse_args()
    if options.one:
        folder, _, count = options.turns.partition(":")
        run_one(options.out, Turns(Path(folder), int(count)), *options.one)
        return
    texts = (options.models, options.modes, options.connectors)
    names = list(itertools.product(*(text.split(",") for text in texts)))
    if options.engines:
        names = [tuple(text.split("/")) for text in options.engines.split(",")]
    run_all(options.out, names, options.at_once, are_timed=not options.checks_only)


if __name__ == "__main__":
    main()
