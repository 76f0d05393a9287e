"""What a chunk's bytes depend on in vLLM, besides tokens and geometry."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.runtime.assemble import ModelIdentity
from kvstrata.runtime.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> ModelIdentity:
    """The weights, hashes and kernels behind the bytes of this engine's caches."""
    cache = vllm_config.cache_config
    facts = {
        "layout": getattr(config, "kv_cache_layout", None),
        "dtype": str(vllm_config.model_config.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "state_dtypes": [
            str(getattr(cache, "mamba_cache_dtype", None)),
            str(getattr(cache, "mamba_ssm_cache_dtype", None)),
        ],
        "platform": _platform(),
        "backend": str(getattr(vllm_config, "attention_config", None)),
        "specs": [repr(group.kv_cache_spec) for group in config.kv_cache_groups],
        "rope": str(getattr(vllm_config.model_config.hf_config, "rope_parameters", None)),
    }
    kernels = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    hashing = f"vllm/{cache.prefix_caching_hash_algo}"
    return ModelIdentity(_weights(vllm_config), hashing, f"/vllm/{kernels}")


def _weights(vllm_config: VllmConfig) -> str:
    """A digest of the model's directory; of its name where there is none to read."""
    model = vllm_config.model_config
    folder = Path(model.model)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return weights_digest(folder)
    facts = [model.model, model.revision, vllm_config.load_config.load_format, model.seed]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _platform() -> str:
    """Pages are packed for the instruction set of a CPU, and otherwise on each GPU."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - known when it is needed

    name = str(current_platform.device_type)
    if name != "cpu":
        return name
    flags = _cpu_flags() & {"amx_bf16", "avx512f", "avx512_bf16", "avx2", "asimd"}
    return f"{name}/{platform.machine()}/{','.join(sorted(flags))}"


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {
        flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()
    }
