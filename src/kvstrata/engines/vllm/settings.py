"""Our settings out of vLLM's configuration, and what of the latter we can work with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstrata.config.parsing import parse_config, read_config
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from kvstrata.config.schema import Config

_log = logging.getLogger(__name__)


def read_settings(vllm_config: VllmConfig) -> Config:
    """Our settings: inline, or in the file that `config` names.

    Raises:
        ConfigError: a setting is wrong, or vLLM is set up in a way that we cannot work with.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    _check_role(transfer)
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", "it is off", "true: hits are found by prefix")
    _check_parallel(vllm_config)
    settings = dict(transfer.kv_connector_extra_config or {})
    if "config" not in settings:
        return parse_config(settings)
    path = settings.pop("config")
    if settings:
        raise ConfigError(
            "config", f"it stands beside {', '.join(settings)}", "a file alone, or settings alone"
        )
    return read_config(path)


def warn_of_failure_policy(vllm_config: VllmConfig) -> None:
    """Point out a policy that turns a lost chunk into a lost request."""
    policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        _log.warning(
            "kv_load_failure_policy is %r: a load that fails would end its request with an error; "
            'set it to "recompute", and it costs time only',
            policy,
        )


def _check_role(transfer: KVTransferConfig) -> None:
    if transfer.kv_role != "kv_both":
        raise ConfigError("kv_role", f"{transfer.kv_role!r} is not a cache's role", '"kv_both"')


def _check_parallel(vllm_config: VllmConfig) -> None:
    """Stages and context ranks hold other layers and tokens than each other's."""
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(name, f"it is {size}", "1; tensor and data parallelism have no limit")
