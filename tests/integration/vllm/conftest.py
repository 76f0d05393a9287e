"""Real vLLM (CPU build), in this process, on tiny checkpoints with weights that matter."""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from kvstrata.core.ids import GroupId
from kvstrata.testing.vllm_checkpoints import COMMON, make_checkpoint
from kvstrata.transfers.native_queue import NativeQueue

from .random_weights import draw_weights

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstrata.runtime.scheduler_side import SchedulerSide
    from kvstrata.runtime.worker_side import RankMemory
    from kvstrata.transfers.cache_views import CacheViews

FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "intermediate_size": 256,
            "intermediate_size_mlp": 256,
            "num_hidden_layers": 4,
            "head_dim": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 256,
        },
    ),
}
"""Architectures that the embedded engine does not have: their classes, and what is tiny in them."""


@dataclass(frozen=True)
class Answer:
    """What vLLM said to one prompt."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int


class Served:
    """One vLLM engine, with or without our connector."""

    def __init__(self, model: Path, settings: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM  # noqa: PLC0415 - slow to import

        if settings is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVStrataConnector",
                "kv_connector_module_path": "kvstrata.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings,
            }
        common = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "auto",
            "max_model_len": 2048,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        self.llm = LLM(str(model), **common | options)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def side(self) -> SchedulerSide:
        side: SchedulerSide = self.core.scheduler.connector._scheduler_side  # noqa: SLF001
        return side

    @property
    def worker(self) -> RankMemory:
        """What the only rank has."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        connector: Any = get_kv_transfer_group()
        memory: RankMemory = connector._worker_side._memory  # noqa: SLF001
        return memory

    @property
    def views(self) -> CacheViews:
        """The only rank's caches, as bytes."""
        copies: Any = self.worker.copies
        owner = copies if isinstance(copies, NativeQueue) else copies._copier  # noqa: SLF001
        return cast("CacheViews", owner._views)  # noqa: SLF001

    def cached_bytes(self) -> dict[tuple[int, bytes], set[bytes]]:
        """The content of every block that vLLM could find now, by group and hash."""
        context: Any = self.side._context  # noqa: SLF001
        contents: dict[tuple[int, bytes], set[bytes]] = {}
        for block in map(context.get_block, range(len(context._pool.blocks))):  # noqa: SLF001
            if block.block_hash is not None and not block.is_null:
                known = contents.setdefault((block.group_id, block.block_hash), set())
                known.add(self._bytes_of(block.group_id, block.block_id))
        return contents

    def _bytes_of(self, group_id: int, block: int) -> bytes:
        size = self.side._geometry.groups[group_id].group.rows_per_block  # noqa: SLF001
        rows = range(block * size, (block + 1) * size)
        return self.views.gather(GroupId(group_id), rows).numpy().tobytes()

    def ask(self, *prompts: Sequence[int], max_tokens: int = 6) -> list[Answer]:
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=3, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        return [
            Answer(
                list(output.outputs[0].token_ids),
                [{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs],
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def settle(self, within_s: float = 20.0) -> None:
        """Let stores and demotions end; vLLM's own loop stops with the last request."""
        end = time.monotonic() + within_s
        while self.side.has_pending_work:
            assert time.monotonic() < end, "something never ends"
            self.core.step()
            time.sleep(0.002)

    def hold(self, name: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep reads from disk ("read"), or copies to the device ("load"), at a gate.

        Copies have to be those in Python, see `plain_copies`.
        """
        memory: Any = self.worker
        owner = memory.tiers[0]._store if name == "read" else memory.copies._copier  # noqa: SLF001
        really = getattr(owner, name)

        def gated(*args: Any) -> Any:
            assert gate.wait(20)
            return really(*args)

        monkeypatch.setattr(owner, name, gated)

    def step_until_held(self, name: str) -> None:
        """Until a request waits for what is kept at the gate."""
        side, end = self.side, time.monotonic() + 20
        while not (side._stack.num_pending if name == "read" else len(side._loading)):  # noqa: SLF001
            assert time.monotonic() < end
            self.llm.llm_engine.step()

    def drop_device_cache(self) -> None:
        self.settle()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        from vllm.distributed.parallel_state import (  # noqa: PLC0415
            cleanup_dist_env_and_memory,
        )

        self.core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def forget_connector() -> None:
    """Close what a start that failed has left: vLLM would use it for the next engine."""
    from vllm.distributed.kv_transfer.kv_transfer_state import (  # noqa: PLC0415
        ensure_kv_transfer_shutdown,
    )
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: PLC0415

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


class Checkpoints:
    """Tiny models that vLLM runs, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, arch: str, seed: int = 0) -> Path:
        folder = self._folder / f"{arch}-{seed}"
        if not folder.exists() and arch in FOREIGN:
            make_foreign(arch, folder)
        elif not folder.exists():
            make_checkpoint(arch, folder, seed)
        return folder


def make_foreign(arch: str, folder: Path) -> None:
    """A checkpoint by `transformers`, with weights that every token passes on to the next ones."""
    import transformers  # noqa: PLC0415 - slow to import

    name, changes = FOREIGN[arch]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    settings = {**COMMON, "vocab_size": 256, "max_position_embeddings": 4096, "pad_token_id": 0}
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**settings | changes))
    draw_weights(model)
    model.to(torch.float32).save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def serve() -> Any:
    pytest.importorskip("vllm")

    @contextmanager
    def make(
        model: Path, settings: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Served]:
        try:
            served = Served(model, settings, **options)
        except BaseException:
            forget_connector()
            raise
        try:
            yield served
        finally:
            served.close()

    return make


@pytest.fixture(scope="session")
def prompt_of() -> Any:
    def make(num_tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 256, (num_tokens,), generator=generator).tolist()

    return make
