"""A connector that keeps whole blocks in a dictionary, to test engines with.

It stores every block as soon as it is final and loads the longest prefix it has. It can be slow,
undecided or broken on purpose. It is small enough to show what an engine may expect of a connector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.layout import GroupKind
from kvstrata.engine.cache.prefix_cache import PrefixSearch, needed_positions
from kvstrata.runtime.seam import EndedLoads, Match
from kvstrata.transfers.cache_views import CacheViews

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvstrata.core.layout import KVGroup, KVLayout
    from kvstrata.runtime.seam import (
        BlockTables,
        NewRequest,
        RequestProgress,
        SchedulerContext,
        StepProgress,
    )
    from kvstrata.transfers.cache_views import LayerCache


class BlockCopy(msgspec.Struct, frozen=True):
    """One block to copy, and the name it is kept under."""

    key: bytes
    group_id: int
    block_id: int


class Message(msgspec.Struct, frozen=True):
    """What a step's ranks shall copy."""

    stores: list[BlockCopy] = []
    loads: dict[str, list[BlockCopy]] = {}


class Report(msgspec.Struct, frozen=True):
    """What a rank has copied."""

    stored: list[BlockCopy] = []
    loaded: list[str] = []


@dataclass
class Behaviour:
    """How the connector misbehaves."""

    load_steps: int = 0
    """Steps that a load waits before it starts."""
    undecided: int = 0
    """How often each request is told to ask again."""
    failing_loads: int = 0
    """How many of the next loads fail: their blocks are left as they were."""
    is_holding: bool = False
    """Whether stored blocks are held until this is set back."""


@dataclass
class _Load:
    copies: list[BlockCopy]
    steps_left: int
    is_failing: bool = False


class MemoryScheduler:
    """The scheduler half.

    Args:
        layout: the model's groups.
        behaviour: may be changed at any time.
    """

    def __init__(self, layout: KVLayout, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.stored: set[ChunkKey] = set()
        self.num_loaded_blocks = 0
        self._layout = layout
        self._search = PrefixSearch(layout, lambda key: 1 if key in self.stored else None)
        self._requests: dict[str, NewRequest] = {}
        self._computed: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._local: dict[str, int] = {}
        self._loads: dict[str, _Load] = {}
        self._started: dict[str, _Load] = {}
        self._held: list[int] = []
        self._storing: set[ChunkKey] = set()

    @property
    def has_pending_work(self) -> bool:
        """Whether copies are under way."""
        return bool(self._loads or self._started or self._storing)

    @property
    def num_held(self) -> int:
        """Blocks that are held for stores."""
        return len(self._held)

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Keep the way to the engine's blocks."""
        self._context = context

    def add_request(self, request: NewRequest) -> None:
        """Remember a request."""
        self._requests[request.request_id] = request
        self._asked[request.request_id] = 0

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """The longest stored prefix."""
        self._asked[request_id] += 1
        if self._asked[request_id] <= self.behaviour.undecided:
            return None
        hashes = self._requests[request_id].hashes
        most = self._requests[request_id].num_prompt_tokens - 1
        length = self._search.longest(hashes, most).num_tokens
        self._local[request_id] = local_tokens
        return Match(max(0, length - local_tokens))

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """Start a load, or note where computing starts."""
        length = self._local.get(request_id, 0) + external_tokens
        self._computed[request_id] = length
        if not external_tokens:
            return
        copies = self._copies(request_id, tables, length)
        self._loads[request_id] = _Load(copies, self.behaviour.load_steps)
        if self.behaviour.failing_loads:
            self.behaviour.failing_loads -= 1
            self._loads[request_id].is_failing = True

    def plan_step(self, progress: StepProgress) -> bytes:
        """Store what this step makes final, and start loads that have waited."""
        for request_id in progress.preempted:
            self._computed.pop(request_id, None)
        stores = [copy for running in progress.running for copy in self._final(running)]
        self._storing.update(ChunkKey(copy.key) for copy in stores)
        held = [copy.block_id for copy in stores]
        self._context.touch(held)
        self._held += held
        return msgspec.msgpack.encode(Message(stores, self._ready_loads()))

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """What every rank has done, is done."""
        said = [msgspec.msgpack.decode(report, type=Report) for report in reports]
        stored = {ChunkKey(copy.key) for copy in said[0].stored}
        loaded = frozenset(said[0].loaded)
        assert all(frozenset(report.loaded) == loaded for report in said)
        self.stored |= stored
        self._storing -= stored
        if not self.behaviour.is_holding:
            self._context.free_blocks(self._held)
            self._held = []
        ended = {request_id: self._started.pop(request_id) for request_id in loaded}
        failed = frozenset(name for name, load in ended.items() if load.is_failing)
        self.num_loaded_blocks += sum(len(ended[name].copies) for name in loaded - failed)
        return EndedLoads(loaded - failed, failed)

    def finished(self, request_id: str) -> None:
        """Forget a request; a load under way is still reported."""
        del self._requests[request_id], self._asked[request_id]
        self._computed.pop(request_id, None)
        self._local.pop(request_id, None)

    def reset(self) -> bool:
        """Forget what is stored."""
        self.stored.clear()
        return True

    def take_events(self) -> Sequence[object]:
        """Nothing is announced."""
        return []

    def close(self) -> None:
        """Nothing is open."""

    def _copies(self, request_id: str, tables: BlockTables, length: int) -> list[BlockCopy]:
        """The blocks to load, group by group."""
        hashes, local = self._requests[request_id].hashes, self._local[request_id]
        return [
            BlockCopy(self._search.key(hashes, GroupId(g), position), g, tables[g][position])
            for g, group in enumerate(self._layout.groups)
            for position in needed_positions(group, length)
            if position >= local // group.block_tokens
        ]

    def _final(self, running: RequestProgress) -> list[BlockCopy]:
        """The blocks that a step makes final and that are not stored yet."""
        name, stop = running.request_id, running.computed_tokens
        start, self._computed[name] = self._computed.get(name, 0), stop
        hashed = len(self._requests[name].hashes) * self._layout.hash_block_tokens
        tables = self._context.request_blocks(name)
        places = [
            (GroupId(g), position, tables[g][position])
            for g, group in enumerate(self._layout.groups)
            if group.kind is not GroupKind.RECURRENT
            for position in group_positions(group, start, min(stop, hashed))
        ]
        for state in running.offered_states:
            end = state.num_tokens // self._layout.groups[state.group_id].block_tokens
            places.append((state.group_id, end - 1, state.block_id))
        copies = [
            BlockCopy(self._search.key(self._requests[name].hashes, g, position), g, block_id)
            for g, position, block_id in places
            if block_id
        ]
        return [c for c in copies if ChunkKey(c.key) not in self.stored | self._storing]

    def _ready_loads(self) -> dict[str, list[BlockCopy]]:
        ready = {}
        for request_id, load in list(self._loads.items()):
            load.steps_left -= 1
            if load.steps_left < 0:
                self._started[request_id] = self._loads.pop(request_id)
                ready[request_id] = [] if load.is_failing else load.copies
        return ready


def group_positions(group: KVGroup, start: int, stop: int) -> range:
    """The blocks that became full between two numbers of tokens."""
    return range(start // group.block_tokens, stop // group.block_tokens)


class MemoryWorker:
    """The worker half: one rank's blocks."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.payloads: dict[bytes, torch.Tensor] = {}
        self._message = Message()

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        """Look at the caches as bytes."""
        self._rows_per_block = [group.rows_per_block for group in layout.groups]
        self._views = CacheViews(layout, caches, num_blocks)

    def start_step(self, message: bytes) -> None:
        """Load."""
        self._message = msgspec.msgpack.decode(message, type=Message)
        for copies in self._message.loads.values():
            for copy in copies:
                self._views.scatter(
                    GroupId(copy.group_id), self._rows(copy), self.payloads[copy.key]
                )

    def finish_step(self) -> bytes:
        """Store."""
        for copy in self._message.stores:
            self.payloads[copy.key] = self._views.gather(GroupId(copy.group_id), self._rows(copy))
        return msgspec.msgpack.encode(Report(self._message.stores, list(self._message.loads)))

    def close(self) -> None:
        """Nothing is open."""

    def _rows(self, copy: BlockCopy) -> range:
        rows = self._rows_per_block[copy.group_id]
        return range(copy.block_id * rows, (copy.block_id + 1) * rows)


class UnwillingWorker(MemoryWorker):
    """A worker half that cannot start on the second rank."""

    def __init__(self, rank: int = 0) -> None:
        if rank == 1:
            raise OSError("no memory")
        super().__init__(rank)
