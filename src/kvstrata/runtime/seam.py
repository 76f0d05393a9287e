"""The seam between an engine and a connector, the same for every engine.

    engine                          connector
    ------                          ---------
    a request arrives               SchedulerConnector.add_request
    before it is first scheduled    match: how many tokens more than the engine has itself?
    it was given blocks             allocated: with external tokens, the load starts and the request
                                    waits
    every step                      plan_step -> message -> WorkerConnector.start_step, forward,
                                    finish_step -> report -> report: which loads have ended
    it ended                        finished
    the cache is thrown away        reset

The scheduler half reads and holds the engine's blocks through a `SchedulerContext`. The two halves
share nothing but messages; there is one worker half per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstrata.core.ids import BlockHash, GroupId
    from kvstrata.core.layout import KVLayout
    from kvstrata.transfers.cache_views import LayerCache

BlockTables = tuple["Sequence[int]", ...]
"""A request's blocks in the order of its tokens, by group; the null block where it has none."""


class BlockView(NamedTuple):
    """What one block of the engine's pool is, at the time of asking."""

    block_id: int
    ref_count: int
    """How many hold it; at 0 it waits in the free queue."""
    block_hash: BlockHash | None
    """The prefix that its content belongs to, if it can be found by it."""
    group_id: GroupId | None
    """The group that its content belongs to, if it has a hash."""
    is_null: bool
    """Whether it stands for no block: never read, written or held."""
    place: int | None = None
    """The engine's own mark of its place in the free queue."""


class SchedulerContext(Protocol):
    """An engine's block pool and queues, for the connector's scheduler half.

    Scheduler thread only. Nothing here blocks.
    """

    def get_block(self, block_id: int) -> BlockView:
        """What a block is now. Changes nothing."""
        ...

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more each: a free one leaves the free queue and keeps its content."""
        ...

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let blocks go that were held; at 0 they join the free queue, in this order."""
        ...

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """The free queue, next to be taken first.

        With `after`, a view that an earlier walk gave, the walk goes on behind it. If that block
        has left the queue since, the walk goes on where it stood, or from the front where the
        engine does not know: it may repeat a block, it skips none. Blocks may be touched and freed
        during a walk.
        """
        ...

    def request_blocks(self, request_id: str) -> BlockTables:
        """The blocks of a request by group; empty tables if it has none."""
        ...

    def waiting_requests(self) -> Sequence[str]:
        """The requests that wait to be scheduled, next first."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask of the cache."""

    max_offload_tokens: int | None = None
    """Nothing beyond this is stored; None: no limit."""
    max_load_tokens: int | None = None
    """No hit is longer than this; None: no limit."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that has arrived."""

    request_id: str
    hashes: Sequence[BlockHash]
    """One per hash block of the layout; the live list, which grows with the request."""
    tokens: Sequence[int]
    """The live list too; longer than the prompt as soon as the answer begins."""
    num_prompt_tokens: int
    lora: str | None = None
    limits: RequestLimits = RequestLimits()
    adapter_weights: bytes = b""
    """A digest of the weights that are the request's own, besides the engine's; empty: none are."""


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a request a connector can load."""

    external_tokens: int
    """Tokens beyond those that the engine has itself; 0: none."""


@dataclass(frozen=True, slots=True)
class OfferedState:
    """A recurrent state that rests in a block when this step has been computed."""

    group_id: GroupId
    block_id: int
    num_tokens: int
    """The state is the one after this many tokens."""


class RequestProgress(NamedTuple):
    """What a step does for one request; made for every running one in every step."""

    request_id: str
    computed_tokens: int
    """Tokens whose cache entries are final when this step has been computed."""
    offered_states: tuple[OfferedState, ...] = ()


class StepProgress(NamedTuple):
    """What a step does."""

    running: Sequence[RequestProgress]
    preempted: Sequence[str] = ()
    """Requests that lost their blocks and will start again."""


@dataclass(frozen=True, slots=True)
class EndedLoads:
    """Loads that every rank has reported on."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    """Requests whose blocks do not hold what was promised."""

    def with_done(self, request_ids: Iterable[str]) -> EndedLoads:
        """These as well."""
        return EndedLoads(self.done.union(request_ids), self.failed)

    def with_failed(self, request_ids: Iterable[str]) -> EndedLoads:
        """These as well."""
        return EndedLoads(self.done, self.failed.union(request_ids))


class SchedulerConnector(Protocol):
    """The half beside the engine's scheduler: decides. Scheduler thread only, never blocks."""

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping though no request needs it."""
        ...

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Called once, before the first request."""
        ...

    def add_request(self, request: NewRequest) -> None:
        """A request has arrived."""
        ...

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """How much can be loaded behind the engine's own hit; None: not known yet, ask again.

        A match leaves at least one token to compute and ends where every group can go on; others
        are dropped. May be called in every step until the request is admitted.
        """
        ...

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The request has blocks. With external tokens it waits until its load is reported."""
        ...

    def plan_step(self, progress: StepProgress) -> bytes:
        """Called once in every step; the message reaches every rank before it computes."""
        ...

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """What every rank said after the step, in the order of the ranks."""
        ...

    def finished(self, request_id: str) -> None:
        """The request ended or was aborted.

        Its blocks are free after this call, except while a load writes to them: then they are
        when that load has been reported.
        """
        ...

    def reset(self) -> bool:
        """Forget everything stored; False: that was not possible."""
        ...

    def take_events(self) -> Sequence[object]:
        """Hand over what has happened since the last call."""
        ...

    def close(self) -> None:
        """Stop. Does nothing on successive calls."""
        ...


class WorkerConnector(Protocol):
    """The half beside one rank: moves bytes. Called on the rank's thread."""

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        """Called once, before the first step."""
        ...

    def start_step(self, message: bytes) -> None:
        """Before the rank computes."""
        ...

    def finish_step(self) -> bytes:
        """After the rank has computed; what to tell the scheduler half."""
        ...

    def close(self) -> None:
        """Stop: touch no cache after this. Does nothing on successive calls."""
        ...
