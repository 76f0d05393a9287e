"""The hooks beside a rank, for several connectors as one.

A child that raises is closed on this rank: its loads under way are reported as failed, its saves
as done, and the scheduler half stops it. A child that the scheduler half has stopped gets nothing
more to do, ends what it has under way, and is closed then. vLLM hears of requests that it waits
for, once each. Called on the rank's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvstrata.engines.several.loads import RankLoads
from kvstrata.engines.several.rank_guard import RankChild, RankState
from kvstrata.engines.several.saves import RankSaves
from kvstrata.engines.vllm.multi_messages import MultiMetadata, MultiReport
from kvstrata.engines.vllm.multi_start import WorkerStart
from kvstrata.runtime.preemption import preempted_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.forward_context import ForwardContext

    from kvstrata.engines.vllm.multi_groups import GroupFacts


class WorkerHooks(WorkerStart):
    """The half of a multi connector that lives beside a rank."""

    def _open_worker(self, connectors: Mapping[str, Any], groups: GroupFacts) -> None:
        self._ranked = {
            name: RankChild(name, connector, time.monotonic)
            for name, connector in connectors.items()
        }
        self._stepping: list[RankChild[Any]] = []
        """Children with metadata of this step."""
        self._rank_groups = groups
        self._rank_loads = RankLoads()
        self._rank_saves = RankSaves()
        self._strays: Counter[str] = Counter()

    def reset_capture_state(self) -> None:
        """Tell every child that graphs were captured."""
        for child in self._ranked.values():
            child.call("reset_capture_state", lambda c: c.reset_capture_state(), None)

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Tell every child that blocks will be overwritten, in its own form."""
        if isinstance(kv_connector_metadata, MultiMetadata):
            self._stop(kv_connector_metadata.stopped)
            for name, part in kv_connector_metadata.parts.items():
                self._ranked[name].call("handle_preemptions", _preempt(part), None)
            return
        ids = set(preempted_ids(kv_connector_metadata))
        for child in self._ranked.values():
            child.call("handle_preemptions", _preempt(ids), None)

    def bind_connector_metadata(self, connector_metadata: MultiMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._stop(connector_metadata.stopped)
        self._rank_loads.begin(connector_metadata.orders)
        self._rank_saves.expect(connector_metadata.savers)
        self._stepping = [self._ranked[name] for name in connector_metadata.parts]
        for child in self._stepping:
            child.call("bind_connector_metadata", _bind(connector_metadata.parts[child.name]), None)

    def clear_connector_metadata(self) -> None:
        """A step is over."""
        super().clear_connector_metadata()
        self._tell("clear_connector_metadata", lambda c: c.clear_connector_metadata())
        self._stepping = []

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Every child starts its loads."""
        self._tell("start_load_kv", lambda c: c.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Every child has loaded a layer."""
        self._tell("wait_for_layer_load", lambda c: c.wait_for_layer_load(layer_name))

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Every child saves a layer."""
        self._tell("save_kv_layer", lambda c: c.save_kv_layer(*args, **kwargs))

    def finish_forward(self) -> None:
        """Tell every child that the model has read its caches."""
        self._tell("finish_forward", lambda c: c.finish_forward())

    def wait_for_save(self) -> None:
        """Every child saves, or has its blocks held."""
        self._tell("wait_for_save", lambda c: c.wait_for_save())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests that vLLM waits for, and whose loads or saves ended on this rank."""
        for child in self._ranked.values():
            self._poll(child, finished_req_ids)
        ended = self._rank_loads.take_ended(self._closed)
        return KVConnectorTransferResults(
            finished_sending=self._rank_saves.take_done(self._closed),
            finished_recving=set(ended.done | ended.failed),
            failed_recving=set(ended.failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive. With several groups vLLM would end; see `_poll`."""
        bad = self._rank_loads.unfilled_blocks(self._closed)
        if len(self._rank_groups.kinds) == 1:
            for child in self._ranked.values():
                bad |= child.call("get_block_ids_with_load_errors", _bad_blocks, set())
        return bad

    def build_connector_worker_meta(self) -> MultiReport | None:
        """What the children of this rank say."""
        stepping = list(self._stepping)
        parts = {
            c.name: c.call("build_connector_worker_meta", _worker_meta, None) for c in stepping
        }
        events = {
            c.name: c.call("get_kv_connector_kv_cache_events", _events, None) for c in stepping
        }
        faults = {name: child.take_fault() for name, child in self._ranked.items()}
        report = MultiReport(
            {name: part for name, part in parts.items() if part is not None},
            {name: some for name, some in events.items() if some is not None},
            {name: fault for name, fault in faults.items() if fault is not None},
            frozenset(name for name, child in self._ranked.items() if child.is_unclean),
            +self._strays,
        )
        self._strays.clear()
        return None if report.is_empty else report

    @property
    def _closed(self) -> set[str]:
        return {name for name, child in self._ranked.items() if child.is_closed}

    def _tell(self, hook: str, call: Callable[[Any], object]) -> None:
        for child in self._stepping:
            child.call(hook, call, None)

    def _stop(self, names: Iterable[str]) -> None:
        """Close children that are stopped, or wait for what they have under way."""
        for name in names:
            child = self._ranked[name]
            child.drain()
            self._close_if_drained(child)

    def _close_if_drained(self, child: RankChild[Any]) -> None:
        is_busy = self._rank_loads.has(child.name) or self._rank_saves.has(child.name)
        if child.state is RankState.DRAINING and (child.is_late or not is_busy):
            child.close()

    def _poll(self, child: RankChild[Any], finished_req_ids: set[str]) -> None:
        """Take in what a child has done."""
        said = child.call(
            "get_transfer_results", lambda c: c.get_transfer_results(finished_req_ids), None
        )
        if said is not None:
            loads, saves = self._rank_loads, self._rank_saves
            strays = loads.report(child.name, said.finished_recving, said.failed_recving)
            self._strays[child.name] += strays + saves.report(child.name, said.finished_sending)
        if len(self._rank_groups.kinds) > 1:
            bad = child.call("get_block_ids_with_load_errors", _bad_blocks, set())
            if self._rank_loads.report_blocks(child.name, bad):
                child.say_once("it says that blocks of no load did not arrive; ignored")
        self._close_if_drained(child)


def _preempt(notice: object) -> Callable[[Any], object]:
    return lambda connector: connector.handle_preemptions(notice)


def _bind(part: object) -> Callable[[Any], object]:
    return lambda connector: connector.bind_connector_metadata(part)


def _bad_blocks(connector: Any) -> set[int]:  # noqa: ANN401 - any vLLM connector
    return set(connector.get_block_ids_with_load_errors() or ())


def _worker_meta(connector: Any) -> Any:  # noqa: ANN401
    return connector.build_connector_worker_meta()


def _events(connector: Any) -> Any:  # noqa: ANN401
    return connector.get_kv_connector_kv_cache_events()
