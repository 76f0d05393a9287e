"""The other hooks beside vLLM's scheduler, for several connectors as one.

    build_connector_meta        the children's metadata travels as one, by name; every child stores
    update_connector_output     each child hears of its own work
    request_finished            blocks are held while any child saves

No exception of a child leaves a hook once vLLM has started. Scheduler thread only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvstrata.engines.several.saves import Saves
from kvstrata.engines.vllm.multi_matching import MatchingHooks
from kvstrata.engines.vllm.multi_messages import MultiMetadata, MultiReport
from kvstrata.engines.vllm.multi_start import SchedulerStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstrata.engines.several.guard import GuardedChild
    from kvstrata.engines.several.loads import Load
    from kvstrata.engines.vllm.multi_groups import GroupFacts


class SchedulerHooks(SchedulerStart, MatchingHooks):
    """The half of a multi connector that lives beside the scheduler."""

    def _open_scheduler(self, children: Sequence[GuardedChild[Any]], groups: GroupFacts) -> None:
        self._children = children
        self._open_matching(children, groups)
        self._saves = Saves()
        self._unclean: frozenset[str] = frozenset()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        """Every child's metadata; a child that raises has none and is stopped with this one."""
        built = [
            (child.name, child.use("build_connector_meta", _build(scheduler_output), None))
            for child in self._children
        ]
        parts = {name: part for name, part in built if part is not None}
        stopped = tuple(child.name for child in self._children if not child.is_active)
        orders = self._loads.take_orders(parts)
        return MultiMetadata(parts, orders, self._saves.take_unsent(), stopped)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle what every rank has reported; each child hears of its own."""
        said = connector_output.kv_connector_worker_meta
        report = said if isinstance(said, MultiReport) else MultiReport()
        self._unclean |= report.unclean
        loaded = self._loads.end(connector_output.finished_recving or ())
        saved = self._saves.end(connector_output.finished_sending or ())
        self._settle_loads(loaded, connector_output.failed_recving or ())
        for child in self._children:
            child.tally.stray_reports += report.strays[child.name]
            if child.name in report.faults:
                child.fail("worker half", report.faults[child.name])
            own = replace(
                connector_output,
                finished_recving={r for r, load in loaded.items() if load.child == child.name},
                finished_sending={r for r, savers in saved.items() if child.name in savers},
                kv_connector_worker_meta=report.parts.get(child.name),
                kv_cache_events=report.events.get(child.name),
                kv_connector_stats=None,
            )
            own.failed_recving = own.failed_recving & own.finished_recving
            _tell_output(child, own)

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Offer the end of a request to every child; True: somebody saves it."""
        request_id = request.request_id
        if request_id in self._loads:  # its blocks are freed when the load has been reported
            return False
        for child in self._children:
            if child.use(
                "register_finished_partial_tail",
                lambda c: c.register_finished_partial_tail(
                    request, block_ids, partial_tail_offloads
                ),
                otherwise=False,
            ):
                self._saves.add(request_id, child.name)
        return request_id in self._saves

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request of a model with one group ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; True: its blocks are held until every saver has reported.

        A request that ends during its load is freed by vLLM when that is reported, and must not
        be freed twice: nothing of it has been computed since, so nobody needs its blocks.
        """
        request_id = request.request_id
        params: dict[str, Any] = {}
        for child in self._children:
            saves, said = child.settle("request_finished", _finish(request, block_ids), (False, {}))
            if saves and request_id not in self._loads:
                self._saves.add(request_id, child.name)
            if params.keys() & (said or {}).keys():
                child.say_once("another connector sets the same kv_transfer_params; its are used")
            params = {**(said or {}), **params}
        self._rounds.forget(request_id)
        return request_id in self._saves, params or None

    def has_pending_push_work(self) -> bool:
        """Whether any child wants vLLM to go on stepping."""
        return any(
            child.use("has_pending_push_work", lambda c: c.has_pending_push_work(), otherwise=False)
            for child in self._children
        )

    def has_pending_block_frees(self) -> bool:
        """Whether any child will let go of blocks by itself."""
        hook = "has_pending_block_frees"
        return any(
            child.use(hook, lambda c: c.has_pending_block_frees(), otherwise=False)
            for child in self._children
        )

    def reset_cache(self) -> bool:
        """Every child forgets what it stored; False: one that is in use could not."""
        answers = [
            child.use("reset_cache", lambda c: c.reset_cache(), None) for child in self._children
        ]
        return False not in answers

    def take_events(self) -> Iterable[Any]:
        """What has happened in every child, child by child."""
        return [
            event
            for child in self._children
            for event in child.settle("take_events", lambda c: list(c.take_events()), ())
        ]

    def _settle_loads(self, loaded: Mapping[str, Load], failed: Iterable[str]) -> None:
        """Count what was loaded; blocks that somebody may still write to are held for ever."""
        by_name: dict[str | None, GuardedChild[Any]] = {c.name: c for c in self._children}
        for request_id, load in loaded.items():
            child = by_name.get(load.child)
            if child is None:
                continue
            if request_id not in failed:
                child.tally.loaded_tokens += load.num_tokens
                continue
            child.tally.failed_loads += 1
            self._rounds.fail(request_id, child.name)
            if child.name in self._unclean and self._pool is not None:
                self._pool.touch([self._pool.blocks[block] for block in sorted(load.blocks)])


def _build(scheduler_output: SchedulerOutput) -> Callable[[Any], Any]:
    def build(connector: Any) -> Any:  # noqa: ANN401 - any vLLM connector
        metadata = connector.build_connector_meta(scheduler_output)
        assert metadata is not None, "no metadata"  # vLLM would end on it
        return metadata

    return build


def _tell_output(child: GuardedChild[Any], output: KVConnectorOutput) -> None:
    child.settle("update_connector_output", lambda c: c.update_connector_output(output), None)


def _finish(
    request: Request, block_ids: tuple[list[int], ...]
) -> Callable[[Any], tuple[bool, dict[str, Any] | None]]:
    def finish(connector: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        if isinstance(connector, SupportsHMA):
            saves, params = connector.request_finished_all_groups(request, block_ids)
        else:
            saves, params = connector.request_finished(request, block_ids[0])
        return bool(saves), params

    return finish
