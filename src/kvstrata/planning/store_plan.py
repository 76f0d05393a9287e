"""Which chunks of a request are worth storing now.

    full       every complete chunk
    window     complete chunks that some later hit can reach; with recurrent groups in the model,
               hits end only where a state is kept, so most windows are never read again
    recurrent  states that exist at this moment, at lengths where a hit can end

The result is in the order of the tokens: when room runs out, the prefix is what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, floor_to, whole_units
from kvstrata.planning.group_rules import lengths_reading
from kvstrata.planning.request_ledger import ChunkProgress, ChunkRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.core.chunk_grid import GroupChunks
    from kvstrata.core.spans import Span
    from kvstrata.planning.request_ledger import RequestLedger


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The chunks to store, in the order of their ends."""

    chunks: tuple[ChunkRef, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks)


_NOTHING = StorePlan()


def choose_stores(ledger: RequestLedger, limit_tokens: int | None = None) -> StorePlan:
    """Choose the chunks that are complete, not stored, and of use to a later request.

    Changes nothing: tell the ledger with `begin` which of them are really stored.

    Args:
        ledger: the request's progress.
        limit_tokens: store nothing that ends beyond this; None: everything computed.
    """
    if not ledger.has_news:
        return _NOTHING
    end = ledger.storable_tokens
    if limit_tokens is not None:
        end = min(end, limit_tokens)
    states = _states(ledger, end)
    offered = frozenset(states)
    groups = ledger.grid.geometry.groups
    chosen = list(states)
    for chunks in groups:
        if chunks.group.kind is GroupKind.FULL:
            chosen.extend(_complete(ledger, chunks, end))
        elif chunks.group.kind is GroupKind.WINDOW:
            reachable = (
                ref
                for ref in _complete(ledger, chunks, end)
                if _is_reachable(ledger, offered, lengths_reading(chunks, ref.chunk))
            )
            chosen.extend(reachable)
    chosen.sort(key=lambda ref: (ref.chunk + 1) * groups[ref.group_id].chunk_tokens)
    return StorePlan(tuple(chosen))


def _states(ledger: RequestLedger, end: int) -> list[ChunkRef]:
    """The offered states that have a key and a length at which a hit can end."""
    geometry = ledger.grid.geometry
    stride = geometry.layout.hit_stride_tokens
    refs = {
        ChunkRef(group_id, geometry.groups[group_id].chunk_ending_at(boundary))
        for group_id, boundary in ledger.offers
        if 0 < boundary <= end and boundary % stride == 0
    }
    return [ref for ref in refs if ledger.progress(ref) is ChunkProgress.OPEN]


def _complete(ledger: RequestLedger, chunks: GroupChunks, end: int) -> Iterator[ChunkRef]:
    for index in ledger.open_chunks(chunks.group_id, chunks.num_chunks(end)):
        yield ChunkRef(chunks.group_id, index)


def _is_reachable(ledger: RequestLedger, offered: frozenset[ChunkRef], lengths: Span) -> bool:
    """Whether a hit can end at one of these lengths.

    Without recurrent groups it can at every aligned one. With them it can where this request has
    kept, or is about to keep, a state of each.
    """
    geometry = ledger.grid.geometry
    stride = geometry.layout.hit_stride_tokens
    if floor_to(lengths.stop - 1, stride) < lengths.start:
        return False
    if not geometry.recurrent:
        return True
    leader = geometry.recurrent[0]
    size = leader.chunk_tokens
    first, stop = ceil_div(lengths.start, size) - 1, whole_units(lengths.stop - 1, size)
    kept = ledger.taken_chunks(leader.group_id, first, stop)
    kept += [i for group_id, i in offered if group_id == leader.group_id and first <= i < stop]
    return any(_has_every_state(ledger, offered, (index + 1) * size) for index in kept)


def _has_every_state(ledger: RequestLedger, offered: frozenset[ChunkRef], length: int) -> bool:
    refs = (
        ChunkRef(chunks.group_id, chunks.chunk_ending_at(length))
        for chunks in ledger.grid.geometry.recurrent
    )
    return all(ref in offered or ledger.is_taken(ref) for ref in refs)
