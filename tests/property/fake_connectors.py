"""Connectors for a fake device, with the blocks they hold counted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kvstrata.core.ids import BlockHash
from kvstrata.runtime.seam import EndedLoads, Match
from kvstrata.testing.memory_connector import Behaviour, MemoryScheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.seam import (
        BlockTables,
        BlockView,
        NewRequest,
        OfferedState,
        SchedulerContext,
        StepProgress,
    )

    from .fake_device import FakeDevice


class CountingContext:
    """A context that counts how often a connector holds each block."""

    def __init__(self, context: SchedulerContext) -> None:
        self.held: Counter[int] = Counter()
        self._context = context

    def get_block(self, block_id: int) -> BlockView:
        """What a block is now."""
        return self._context.get_block(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks, and count."""
        ids = list(block_ids)
        self.held.update(ids)
        self._context.touch(ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Let blocks go, and count."""
        ids = list(block_ids)
        self.held.subtract(ids)
        self._context.free_blocks(ids)

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        """The free queue."""
        return self._context.iter_free_blocks(after)

    def request_blocks(self, request_id: str) -> BlockTables:
        """The blocks of a request."""
        return self._context.request_blocks(request_id)

    def waiting_requests(self) -> Sequence[str]:
        """The requests that wait."""
        return self._context.waiting_requests()


class CountingScheduler(MemoryScheduler):
    """A memory connector that tells which blocks it holds and what it was offered."""

    context: CountingContext

    def __init__(self, layout: KVLayout, behaviour: Behaviour) -> None:
        super().__init__(layout, behaviour)
        self.offered: list[tuple[str, OfferedState]] = []

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Count what goes through the context."""
        self.context = CountingContext(context)
        super().bind_scheduler_context(self.context)

    def plan_step(self, progress: StepProgress) -> bytes:
        """Note the states on offer."""
        self.offered = [
            (running.request_id, state)
            for running in progress.running
            for state in running.offered_states
        ]
        return super().plan_step(progress)


class Fill(msgspec.Struct, frozen=True):
    """Tokens to put into a request's blocks."""

    tables: list[list[int]]
    name: bytes
    start: int
    steps_left: int
    is_failing: bool


class BoldScheduler:
    """Loads prefixes of any length, so that loads end in the middle of blocks.

    Args:
        layout: for the size of hash blocks.
        behaviour: as for the memory connector, though it holds nothing.
    """

    def __init__(self, layout: KVLayout, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.most_tokens = 0
        """Longest prefix that it claims to have."""
        self._hash_tokens = layout.hash_block_tokens
        self._requests: dict[str, NewRequest] = {}
        self._asked: Counter[str] = Counter()
        self._local: dict[str, int] = {}
        self._fills: dict[str, Fill] = {}
        self._started: dict[str, Fill] = {}

    @property
    def has_pending_work(self) -> bool:
        """Whether loads are under way."""
        return bool(self._fills or self._started)

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """It holds no blocks."""
        self.context = CountingContext(context)

    def add_request(self, request: NewRequest) -> None:
        """Remember a request."""
        self._requests[request.request_id] = request

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        """Claim what it was told to claim, also when that is of no use."""
        self._asked[request_id] += 1
        if self._asked[request_id] <= self.behaviour.undecided:
            return None
        self._local[request_id] = local_tokens
        hashed = len(self._requests[request_id].hashes)
        length = min(hashed, self.most_tokens // self._hash_tokens) * self._hash_tokens
        return Match(max(0, length - local_tokens))

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """Start a load."""
        if not external_tokens:
            return
        start = self._local[request_id]
        end = (start + external_tokens) // self._hash_tokens
        is_failing = self.behaviour.failing_loads > 0
        self.behaviour.failing_loads -= is_failing
        self._fills[request_id] = Fill(
            [list(table) for table in tables],
            self._requests[request_id].hashes[end - 1],
            start,
            self.behaviour.load_steps,
            is_failing,
        )

    def plan_step(self, progress: StepProgress) -> bytes:
        """Start the loads that have waited."""
        del progress
        waiting, ready = {}, {}
        for request_id, fill in self._fills.items():
            if fill.steps_left:
                waiting[request_id] = msgspec.structs.replace(fill, steps_left=fill.steps_left - 1)
            else:
                ready[request_id] = fill
        self._fills, self._started = waiting, ready
        return msgspec.msgpack.encode([f for f in ready.values() if not f.is_failing])

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        """What was started is done."""
        del reports
        ended, self._started = self._started, {}
        failed = frozenset(name for name, fill in ended.items() if fill.is_failing)
        return EndedLoads(frozenset(ended) - failed, failed)

    def finished(self, request_id: str) -> None:
        """Forget a request; a load under way is still reported."""
        del self._requests[request_id]
        self._asked.pop(request_id, None)

    def reset(self) -> bool:
        """Nothing is kept."""
        return True

    def take_events(self) -> Sequence[object]:
        """Nothing is announced."""
        return []

    def close(self) -> None:
        """Nothing is open."""


class BoldWorker:
    """The worker half of `BoldScheduler` on a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def start_step(self, message: bytes) -> None:
        """Load."""
        for fill in msgspec.msgpack.decode(message, type=list[Fill]):
            self._device.fill(fill.tables, BlockHash(fill.name), fill.start)

    def finish_step(self) -> bytes:
        """It has nothing to say."""
        return b""
