"""From a request's progress to stores.

    eager   what a step completes is stored after that step
    lazy    what a step completes becomes a candidate, stored when its blocks are about to be taken

Ownership: scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.chunk_label import label_of
from kvstrata.core.layout import GroupKind
from kvstrata.planning.request_ledger import StateOffer
from kvstrata.planning.store_plan import choose_stores
from kvstrata.runtime.store_jobs import StoreSource
from kvstrata.transfers.copy_plans import blocks_of, rows_to_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.config.schema import StoreConfig
    from kvstrata.planning.request_ledger import ChunkRef
    from kvstrata.runtime.seam import (
        BlockTables,
        OfferedState,
        RequestProgress,
        SchedulerContext,
    )
    from kvstrata.runtime.tracked_request import TrackedRequest


def choose_sources(
    config: StoreConfig,
    request: TrackedRequest,
    progress: RequestProgress,
    context: SchedulerContext,
) -> list[StoreSource]:
    """Take a step into a request's ledger; the chunks worth storing after it, prefix first.

    The ledger is to be told what becomes of them. The engine is asked for the request's blocks only
    if there are any: with 64 requests of 4,096 tokens its answers would take 1 ms in every step.
    """
    ledger = request.ledger
    ledger.advance(progress.computed_tokens)
    for state in progress.offered_states:
        ledger.offer_state(StateOffer(state.group_id, state.num_tokens))
    if config.mode == "off" or not ledger.has_news:
        return []
    chunks = choose_stores(ledger, _limit(config, request)).chunks
    tables = context.request_blocks(request.request_id) if chunks else ()
    sources = list(_sources(request, chunks, progress.offered_states, tables))
    if not sources:
        ledger.begin(())  # so that nothing is chosen again before there is news
    return sources


def _limit(config: StoreConfig, request: TrackedRequest) -> int | None:
    """Nothing that ends beyond this is stored."""
    limit = request.new.limits.max_offload_tokens
    if config.decode:
        return limit
    prompt = request.new.num_prompt_tokens
    return prompt if limit is None else min(limit, prompt)


def _sources(
    request: TrackedRequest,
    refs: Sequence[ChunkRef],
    states: Sequence[OfferedState],
    tables: BlockTables,
) -> Iterator[StoreSource]:
    """Where the chunks' bytes are, as far as they are still on the device."""
    state_blocks = {(s.group_id, s.num_tokens): s.block_id for s in states}
    for ref in refs:
        label = label_of(request.grid, *ref)
        group = request.grid.geometry.groups[ref.group_id].group
        if group.kind is GroupKind.RECURRENT:
            block = state_blocks[ref.group_id, label.tokens.stop]
            yield StoreSource(label, ref, (block,), (block,))
            continue
        rows = rows_to_store(request.grid, ref, tables[ref.group_id])
        if rows is not None:
            blocks = blocks_of(rows, group.rows_per_block)
            yield StoreSource(label, ref, rows, tuple(blocks))
