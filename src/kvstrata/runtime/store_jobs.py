"""Stores under way: room reserved in the arena, source blocks held on the device.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.transfers.copy_queue import ChunkCopy, CopyJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.core.ids import ChunkKey
    from kvstrata.planning.request_ledger import ChunkRef, RequestLedger
    from kvstrata.runtime.seam import SchedulerContext
    from kvstrata.tiers.host_memory import HostMemoryIndex
    from kvstrata.tiers.room import Extent
    from kvstrata.transfers.copy_queue import CopyReport


class StoreSource(NamedTuple):
    """A chunk that could be stored, and where its bytes are."""

    label: ChunkLabel
    ref: ChunkRef
    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    """To be held until the copy is done."""


@dataclass(slots=True)
class Store:
    """A store under way."""

    ledger: RequestLedger | None
    """Whose progress it is; None: nobody's, it was found in the free queue."""
    sources: tuple[StoreSource, ...]
    is_void: bool = False
    """Whether the cache was reset meanwhile: what arrives is thrown away."""

    @property
    def blocks(self) -> list[int]:
        """All source blocks."""
        return [block for source in self.sources for block in source.blocks]


class SettledStore(NamedTuple):
    """What a store led to."""

    stored: tuple[ChunkLabel, ...]
    failed: tuple[ChunkLabel, ...]
    ledger: RequestLedger | None
    """Whose progress it was."""


class StartedStore(NamedTuple):
    """What was begun."""

    job: CopyJob | None
    """None: there was nothing new to copy."""
    evicted: tuple[ChunkKey, ...]
    """What left the arena to make room."""
    num_refused: int
    """Chunks that found no room."""


class StoreJobs:
    """All stores under way.

    Args:
        host: where room is reserved.
        context: how source blocks are held.
        next_job_id: numbers of jobs.
    """

    def __init__(
        self, host: HostMemoryIndex, context: SchedulerContext, next_job_id: Callable[[], int]
    ) -> None:
        self._host = host
        self._context = context
        self._next_job_id = next_job_id
        self._stores: dict[int, Store] = {}

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that are held on the device."""
        return sum(len(s.blocks) for s in self._stores.values() if not s.is_void)

    def start(
        self, sources: Sequence[StoreSource], ledger: RequestLedger | None = None
    ) -> StartedStore:
        """Reserve room for chunks in the order of their tokens, and hold their blocks.

        What is in the arena or on its way there counts as stored; what finds no room stays open.
        """
        by_key = {source.label.key: source for source in sources}
        sizes = [source.label.payload_bytes for source in by_key.values()]
        room = self._host.reserve(list(by_key), sizes)
        chosen = tuple(by_key[key] for key in room.granted)
        if ledger:
            known = [by_key[key].ref for key in room.known]
            ledger.begin([source.ref for source in chosen] + known)
            if known:
                ledger.settle(known)
        if not chosen:
            return StartedStore(None, room.evicted, len(room.refused))
        store = Store(ledger, chosen)
        self._context.touch(store.blocks)
        job_id = self._next_job_id()
        self._stores[job_id] = store
        copies = tuple(_copy(source, room.granted[source.label.key]) for source in chosen)
        job = CopyJob(job_id, copies)
        return StartedStore(job, room.evicted, len(room.refused))

    def end(self, report: CopyReport) -> SettledStore | None:
        """Settle a store that every rank has reported; None: the job is none of these."""
        store = self._stores.pop(report.job_id, None)
        if store is None:
            return None
        if not store.is_void:
            self._context.free_blocks(store.blocks)
        lost = frozenset(_keys(store.sources)) if store.is_void else report.failed
        done = [source for source in store.sources if source.label.key not in lost]
        failed = [source for source in store.sources if source.label.key in lost]
        self._host.settle(_keys(done), _keys(failed))
        if store.ledger:
            store.ledger.settle(_refs(done), _refs(failed))
        return SettledStore(_labels(done), _labels(failed), store.ledger)

    def void(self) -> None:
        """What is under way will not count, so its blocks need not be held."""
        for store in self._stores.values():
            if not store.is_void:
                store.is_void = True
                self._context.free_blocks(store.blocks)


def _copy(source: StoreSource, extents: tuple[Extent, ...]) -> ChunkCopy:
    label = source.label
    return ChunkCopy(label.key, source.ref.group_id, extents, label.payload_bytes, source.rows)


def _keys(sources: Iterable[StoreSource]) -> list[ChunkKey]:
    return [source.label.key for source in sources]


def _refs(sources: Iterable[StoreSource]) -> list[ChunkRef]:
    return [source.ref for source in sources]


def _labels(sources: Iterable[StoreSource]) -> tuple[ChunkLabel, ...]:
    return tuple(source.label for source in sources)
