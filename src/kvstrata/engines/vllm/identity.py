"""What a chunk's bytes depend on in vLLM, besides tokens and geometry.

Chunks are found again only by an engine of which all of this is equal. What cannot be known makes
an engine's chunks its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvstrata.runtime.assemble import ModelIdentity
from kvstrata.runtime.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)


def read_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> ModelIdentity:
    """The weights, hashes and kernels behind the bytes of this engine's caches."""
    cache = vllm_config.cache_config
    facts = {
        "version": _release(vllm.__version__),
        "layout": getattr(config, "kv_cache_layout", None),
        "model": _model(vllm_config.model_config),
        "overrides": _overrides(vllm_config),
        "cache_dtype": str(cache.cache_dtype),
        "state_dtypes": [
            str(getattr(cache, "mamba_cache_dtype", None)),
            str(getattr(cache, "mamba_ssm_cache_dtype", None)),
        ],
        "platform": _platform(),
        "backends": _backends(vllm_config, config),
        "specs": [repr(group.kv_cache_spec) for group in config.kv_cache_groups],
        "own": _own_scales(vllm_config),
        "draft": _draft(vllm_config),
    }
    kernels = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    hashing = f"vllm/{cache.prefix_caching_hash_algo}/{os.environ.get('PYTHONHASHSEED', '')}"
    weights = _weights(vllm_config, vllm_config.model_config)
    return ModelIdentity(weights, hashing, f"/vllm/{kernels}")


def _release(version: str) -> str:
    """Of which pages and hashes may mean something else: 0.32.1 and 0.32.0 agree, 0.33 may not."""
    return ".".join(version.split(".")[:2])


def _model(model: ModelConfig) -> list[str]:
    """What a model's numbers depend on besides its files."""
    rope = str(getattr(model.hf_text_config, "rope_parameters", None))
    length = model.max_model_len if "longrope" in rope else ""  # it chooses between two sets
    return [str(model.dtype), str(model.quantization), rope, str(length)]


def _overrides(vllm_config: VllmConfig) -> str:
    """What the user has changed in the model's configuration."""
    overrides = vllm_config.model_config.hf_overrides
    if callable(overrides):  # it may do anything
        return _engine_id(vllm_config)
    return json.dumps(overrides, sort_keys=True, default=repr)


def _backends(vllm_config: VllmConfig, config: KVCacheConfig) -> list[str]:
    """The kernels that write the caches, as vLLM has chosen them."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    names = (name for group in config.kv_cache_groups for name in group.layer_names)
    found = (getattr(layers.get(name), "attn_backend", None) for name in names)
    return sorted({backend.__name__ for backend in found if backend is not None})


def _own_scales(vllm_config: VllmConfig) -> str:
    """Scales that are computed from the first requests are this engine's alone."""
    is_own = getattr(vllm_config.cache_config, "calculate_kv_scales", False)
    return _engine_id(vllm_config) if is_own else ""


def _draft(vllm_config: VllmConfig) -> list[str]:
    """A model that guesses: its caches lie beside those of the model itself."""
    model = vllm_config.model_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None or (draft.model, draft.revision) == (model.model, model.revision):
        return []
    return [_weights(vllm_config, draft), *_model(draft)]


def _weights(vllm_config: VllmConfig, model: ModelConfig) -> str:
    """A digest of the actual weights; where there are none to read, one that nobody shares."""
    if vllm_config.load_config.load_format == "dummy":
        facts = ["dummy", model.model, model.revision, model.seed, model.hf_config.to_json_string()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()
    folder = _folder(vllm_config, model)
    if folder is not None and any(folder.glob("*.safetensors")):
        return weights_digest(folder)
    _log.warning(
        "the weights of %s are not there as safetensors: chunks are not shared with other engines, "
        "and not found after a restart",
        model.model,
    )
    return hashlib.sha256(_engine_id(vllm_config).encode()).hexdigest()


def _folder(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    """Where a model's files lie: named by the user, or downloaded."""
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with vLLM
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                allow_patterns=["*.safetensors", "config.json"],
                local_files_only=True,
            )
        )
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _engine_id(vllm_config: VllmConfig) -> str:
    """Equal on the ranks of one engine, and never again."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return str(transfer.engine_id)


def _platform() -> str:
    """Pages are packed for the instruction set of a CPU, and otherwise on each GPU."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - known when it is needed

    name = str(current_platform.device_type)
    if name != "cpu":
        return f"{name}/{current_platform.fp8_dtype()}"
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
