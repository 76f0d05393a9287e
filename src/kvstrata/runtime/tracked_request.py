"""One request as the scheduler half knows it.

Ownership: scheduler thread only; dropped when the request has ended and its last job has settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.core.chunk_grid import ChunkGrid
from kvstrata.core.chunk_label import ChunkLabel, label_of
from kvstrata.core.lookups import ChunkLookup, GroupLookups, LookupCodes, once_arrived
from kvstrata.planning.load_plan import LoadBounds, LoadPlan, choose_load
from kvstrata.planning.request_ledger import ChunkRef, RequestLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.chunk_grid import ChunkGeometry
    from kvstrata.core.ids import ChunkKey
    from kvstrata.runtime.seam import NewRequest

    Lookup = Callable[[Sequence[ChunkKey]], LookupCodes]


class Verdict(NamedTuple):
    """How an answer came about."""

    waited_s: float
    ran_out_of_time: bool
    was_too_slow: bool
    """Whether computing was expected to be faster than loading."""


@dataclass(slots=True)
class Life:
    """What stays true of a request when its keys change, or it starts again."""

    is_counted: bool = False
    """Whether its tokens are in the metrics."""


class TrackedRequest:
    """Chunks, progress and plans of one request.

    Args:
        new: as the engine announced it.
        geometry: the engine's chunks.
    """

    def __init__(self, new: NewRequest, geometry: ChunkGeometry) -> None:
        self.request_id = new.request_id
        self.new = new
        self.life = Life()
        self.grid = ChunkGrid(geometry, new.hashes)
        self.ledger = RequestLedger(self.grid)
        self.failed: set[ChunkKey] = set()
        """Not offered to this request again."""
        self.asked_at: float | None = None
        """When the engine first wanted to schedule it."""
        self.patience_s: float | None = None
        """How long it waits for chunks that are on their way; None: as long as is allowed."""
        self.plan: LoadPlan | None = None
        """The last answer."""
        self.verdict: Verdict | None = None
        """How it came about."""
        self.awaited: set[ChunkKey] = set()
        """What is being brought up for it."""
        self.is_admitted = False
        """Whether the engine has given it blocks, and they hold what was promised."""
        self.is_fetched = False
        """Whether nothing more can be brought up for it."""
        self.is_stale = False
        """Whether its blocks may have been computed with other weights than its keys stand for."""

    def renewed(self, geometry: ChunkGeometry) -> TrackedRequest:
        """The same request under other keys; what it has computed is not stored under them."""
        renewed = TrackedRequest(self.new, geometry)
        renewed.life = self.life  # a load under way ends with the old one
        renewed.is_stale = self.asked_at is not None
        return renewed

    def choose(self, lookup: Lookup, local_tokens: int) -> LoadPlan:
        """The longest hit now."""
        return choose_load(self.grid.geometry, self._lookups(lookup), self._bounds(local_tokens))

    def choose_awaited(self, lookup: Lookup, local_tokens: int) -> LoadPlan:
        """The longest hit once everything under way has arrived."""
        arrived = tuple(map(once_arrived, self._lookups(lookup)))
        return choose_load(self.grid.geometry, arrived, self._bounds(local_tokens))

    def labels(self, plan: LoadPlan) -> list[ChunkLabel]:
        """The chunks of a plan, in the order of their tokens."""
        labels = [
            label_of(self.grid, load.group_id, index)
            for load in plan.loads
            for index in load.chunks
        ]
        return sorted(labels, key=lambda label: label.tokens.stop)

    @staticmethod
    def refs(plan: LoadPlan | None) -> list[ChunkRef]:
        """The chunks of a plan, group after group."""
        loads = () if plan is None else plan.loads
        return [ChunkRef(load.group_id, index) for load in loads for index in load.chunks]

    def compute_from_local_hit(self) -> None:
        """The request was given blocks and computes what it has not got."""
        plan = self.plan
        if plan is not None and plan.local_tokens and not self.ledger.computed_tokens:
            self.ledger.resume(plan._replace(num_tokens=plan.local_tokens, loads=()))

    def preempt(self) -> None:
        """The engine took the request's blocks; it starts again."""
        self.ledger.preempt()
        self.plan, self.asked_at = None, None
        self.is_fetched = self.is_admitted = self.is_stale = False

    def lose(self, keys: Iterable[ChunkKey]) -> None:
        """These could not be brought up; go on without those that were awaited."""
        self.failed.update(self.awaited.intersection(keys))

    def fail(self, keys: Iterable[ChunkKey]) -> None:
        """Do not offer these again."""
        self.failed.update(keys)

    def _bounds(self, local_tokens: int) -> LoadBounds:
        limit = self.new.limits.max_load_tokens
        return LoadBounds(len(self.new.tokens), local_tokens, limit)

    def _lookups(self, lookup: Lookup) -> GroupLookups:
        found = self.grid.lookup(lookup)
        return tuple(map(self._without_failed, range(len(found)), found)) if self.failed else found

    def _without_failed(self, group: int, codes: LookupCodes) -> LookupCodes:
        keys = self.grid.keys(self.grid.geometry.groups[group].group_id)
        return LookupCodes(
            bytes(
                ChunkLookup.FAILED if key in self.failed else code
                for key, code in zip(keys, codes, strict=True)
            )
        )
