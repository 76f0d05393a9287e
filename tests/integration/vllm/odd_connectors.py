"""Connectors with one peculiarity each, to stand beside others in a multi connector.

Loaded by vLLM by module path, as anybody's.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvstrata.engines.vllm.connector import KVStrataConnector

HOOKS = {
    "scheduler": (
        "get_num_new_matched_tokens",
        "get_loaded_kv_cache_group_ids",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished_all_groups",
        "has_pending_push_work",
        "take_events",
        "get_kv_connector_stats",
    ),
    "worker": (
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "save_kv_layer",
        "wait_for_save",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
}


class RaisingConnector(KVStrataConnector):
    """Raises in one hook, once that is armed."""

    hook: ClassVar[str]
    armed: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).hook and name in RaisingConnector.armed:
            raise RuntimeError(f"{name} fails on purpose")
        return super().__getattribute__(name)


def _raising(hook: str) -> type[RaisingConnector]:
    """A class of its own, found in this module."""
    name = f"Raising_{hook}"
    kind = type(name, (RaisingConnector,), {"hook": hook, "__module__": __name__})
    globals()[name] = kind
    return kind


RAISING = {side: [_raising(hook) for hook in hooks] for side, hooks in HOOKS.items()}


class SyncConnector(KVStrataConnector):
    """Claims to load within a step."""

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(*args)[0], False


class LateConnector(KVStrataConnector):
    """Says that loads have ended some steps after they did, and that it saves what has ended."""

    load_steps = 5
    save_steps = 3

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(*args)
        return True, {"saved": True}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=self._aged("saves", finished_req_ids, self.save_steps),
            finished_recving=self._aged("loads", results.finished_recving, self.load_steps),
            failed_recving=results.failed_recving,
        )

    def _aged(self, what: str, new: set[str], steps: int) -> set[str]:
        """Those that came so many calls ago."""
        ages: dict[str, int] = self.__dict__.setdefault(what, {})
        for request_id in ages:
            ages[request_id] += 1
        ages.update(dict.fromkeys(new, 0))
        done = {request_id for request_id, age in ages.items() if age >= steps}
        for request_id in done:
            del ages[request_id]
        return done


class LaterConnector(LateConnector):
    """Later still."""

    save_steps = 7


class LyingConnector(KVStrataConnector):
    """Says that loads and saves have ended which nobody waits for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        seen: set[str] = self.__dict__.setdefault("seen", set())
        seen |= finished_req_ids
        return KVConnectorTransferResults(
            finished_sending=seen | {"nobody"},
            finished_recving=results.finished_recving | seen | {"nobody"},
            failed_recving=results.failed_recving | seen,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {1, 2, 3}


class HeadsFirst(KVStrataConnector):
    """Wants a layout of the caches."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        return "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))


class TokensFirst(KVStrataConnector):
    """Wants another."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        return "NHD"
