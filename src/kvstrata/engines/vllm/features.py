"""Whether this vLLM has what the connector calls, found out by looking, never by its version.

A vLLM that lacks something, or wants something that is not known here, is refused with advice:
guessing what a layout or a call means would lead to wrong answers.
"""

from __future__ import annotations

from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvstrata.errors import UnsupportedEngineError

_ADVICE: Final = "kvstrata runs with vLLM 0.30 to 0.32; install one of these, or a newer kvstrata"

_NAMES: Final = (
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
)
_HOOKS: Final = (
    "bind_kv_cache_manager",
    "on_new_request",
    "get_transfer_results",
    "build_connector_worker_meta",
    "update_connector_output",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "reset_cache",
)
"""Called by vLLM; without them stores, loads or their ends would go unnoticed."""
_ABSTRACT: Final = frozenset(
    {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished_all_groups",
    }
)
"""What vLLM may demand of a connector."""


def check_features() -> None:
    """Refuse a vLLM that is too old or too new.

    Raises:
        UnsupportedEngineError: says what is missing or unknown, and what to do.
    """
    lacking = [name for name in _NAMES if not hasattr(base, name)]
    if not lacking:
        connector = base.KVConnectorBase_V1
        lacking = [name for name in _HOOKS if not hasattr(connector, name)]
        demanded = connector.__abstractmethods__ | base.SupportsHMA.__abstractmethods__
        if unknown := sorted(demanded - _ABSTRACT):
            raise UnsupportedEngineError(f"this vLLM demands {', '.join(unknown)}; {_ADVICE}")
    if lacking:
        raise UnsupportedEngineError(f"this vLLM has no {', '.join(lacking)}; {_ADVICE}")
