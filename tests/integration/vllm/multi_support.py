"""Engines with several connectors, and what tests do to them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OURS = {
    "kv_connector": "KVStrataConnector",
    "kv_connector_module_path": "kvstrata.engines.vllm",
    "kv_role": "kv_both",
}


def child(name: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """One of ours, with a directory of its own or none."""
    tiers = [] if folder is None else [disk(folder)]
    settings = {
        "host": {"capacity": "32MiB"},
        "tiers": tiers,
        "load": {"decide": "always", "deadline": "5s"},
    } | changes.pop("settings", {})
    return {"name": name, **OURS, "kv_connector_extra_config": settings, **changes}


def odd(kind: type[Any], **changes: Any) -> dict[str, Any]:
    """One of `odd_connectors`, named like its class."""
    name, module = kind.__name__, kind.__module__
    return child(name, kv_connector=name, kv_connector_module_path=module, **changes)


def disk(folder: Path) -> dict[str, Any]:
    return {"kind": "filesystem", "path": str(folder), "min_free": "0B"}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """vLLM's options."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KVStrataMultiConnector",
            "kv_connector_module_path": "kvstrata.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": list(children)},
        }
    }


def connector(engine: Any) -> Any:
    return engine.core.scheduler.connector


def settle(engine: Any, within_s: float = 20.0) -> None:
    """Let everything end; vLLM's own loop stops with the last request."""
    end = time.monotonic() + within_s
    while engine.core.scheduler.has_requests():
        assert time.monotonic() < end, "something never ends"
        engine.core.step()
        time.sleep(0.002)


def drop_device_cache(engine: Any) -> None:
    settle(engine)
    assert engine.llm.reset_prefix_cache(), "blocks are still held"


def warm(engine: Any, prompt: Sequence[int]) -> Any:
    """The answer with a local hit; all children have the prompt after it, the device has not."""
    engine.ask(prompt)
    [local] = engine.ask(prompt)
    assert local.cached_tokens > 0
    drop_device_cache(engine)
    return local


def start(engine: Any, prompt: Sequence[int], num_steps: int) -> str:
    """A request that has come so far."""
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import

    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine.llm.llm_engine.add_request(
        str(time.monotonic_ns()), {"prompt_token_ids": list(prompt)}, sampling
    )
    for _ in range(num_steps):
        engine.core.step()
    [request_id] = engine.core.scheduler.requests
    return str(request_id)
