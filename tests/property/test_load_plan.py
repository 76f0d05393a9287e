"""The planner against a brute-force oracle that knows nothing but the rule of each kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from hypothesis import event, given

from kvstrata.core.layout import GroupKind
from kvstrata.core.lookups import ChunkLookup, LookupCodes
from kvstrata.planning.load_plan import choose_load, usable_lengths
from kvstrata.testing.strategies import LoadCase, load_cases

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvstrata.core.chunk_grid import GroupChunks

READY = frozenset({ChunkLookup.READY})
AWAITED = READY | {ChunkLookup.ARRIVING, ChunkLookup.UNKNOWN}
ANY = frozenset(ChunkLookup)


def chunks_of_hit(chunks: GroupChunks, length: int, local: int, margin: int = 0) -> range:
    """The chunks that hold a token which a hit of `length` depends on."""
    group, size = chunks.group, chunks.chunk_tokens
    if group.kind is GroupKind.RECURRENT:
        return range(length // size - 1, length // size)
    first = local
    if group.window_tokens is not None:
        first = max(local, length - group.window_tokens + 1)
    last = length + margin - 1
    return range(first // size, last // size + 1) if first <= last else range(0)


def is_valid(case: LoadCase, length: int, accepted: Collection[int]) -> bool:
    if length % case.geometry.layout.alignment_tokens:
        return False
    for chunks, codes in zip(case.geometry.groups, case.lookups, strict=True):
        is_state = chunks.group.kind is GroupKind.RECURRENT
        if is_state and length % chunks.group.boundary_tokens:
            return False
        is_draft = chunks.group.is_draft and not is_state
        margin = case.geometry.layout.hash_block_tokens if is_draft else 0
        needed = chunks_of_hit(chunks, length, case.bounds.local_tokens, margin)
        if not all(chunk < len(codes) and codes[chunk] in accepted for chunk in needed):
            return False
    return True


def oracle_lengths(case: LoadCase, accepted: Collection[int] = READY) -> Iterator[int]:
    """Usable lengths above the local hit, longest first, by trying every one."""
    top = case.bounds.num_tokens - 1
    if case.bounds.max_tokens is not None:
        top = min(top, case.bounds.max_tokens)
    for length in range(top, case.bounds.local_tokens, -1):
        if is_valid(case, length, accepted):
            yield length


def oracle(case: LoadCase, accepted: Collection[int] = READY) -> int:
    return next(oracle_lengths(case, accepted), case.bounds.local_tokens)


@given(load_cases())
def test_length_equals_the_oracles(case: LoadCase) -> None:
    plan = choose_load(case.geometry, case.lookups, case.bounds)

    assert plan.num_tokens == oracle(case)
    assert plan.possible_tokens == oracle(case, ANY)
    assert plan.awaited_tokens == oracle(case, AWAITED)
    assert plan.num_tokens < max(1, case.bounds.num_tokens)
    event(f"{len(case.geometry.groups)} groups, {'a hit' if plan.external_tokens else 'no hit'}")


@given(load_cases())
def test_named_chunks_are_exactly_those_needed(case: LoadCase) -> None:
    plan = choose_load(case.geometry, case.lookups, case.bounds)

    named = {(load.group_id, chunk) for load in plan.loads for chunk in load.chunks}
    needed = {
        (chunks.group_id, chunk)
        for chunks in case.geometry.groups
        if plan.external_tokens
        for chunk in chunks_of_hit(chunks, plan.num_tokens, plan.local_tokens)
    }
    assert named == needed
    for group_id, chunk in named:
        assert case.lookups[group_id][chunk] == ChunkLookup.READY


@given(load_cases())
def test_shorter_lengths_follow_in_order(case: LoadCase) -> None:
    lengths = list(islice(usable_lengths(case.geometry, case.lookups, case.bounds), 6))

    assert lengths == list(islice(oracle_lengths(case), 6))
    if lengths:
        shorter = replace(case.bounds, max_tokens=lengths[0] - 1)
        plan = choose_load(case.geometry, case.lookups, shorter)
        assert plan.num_tokens == next(iter(lengths[1:]), case.bounds.local_tokens)


@given(load_cases())
def test_every_shortfall_has_a_true_reason(case: LoadCase) -> None:
    plan = choose_load(case.geometry, case.lookups, case.bounds)

    assert bool(plan.obstacles) == (plan.num_tokens < plan.possible_tokens)
    for obstacle in plan.obstacles:
        chunks = case.geometry.groups[obstacle.group_id]
        margin = chunks.margin_tokens
        needed = chunks_of_hit(chunks, obstacle.wanted_tokens, plan.local_tokens, margin)
        assert obstacle.wanted_tokens % case.geometry.layout.hit_stride_tokens == 0
        assert obstacle.chunk in needed
        assert obstacle.lookup == case.lookups[obstacle.group_id][obstacle.chunk]
        assert obstacle.lookup != ChunkLookup.READY
        assert plan.num_tokens < obstacle.wanted_tokens <= plan.possible_tokens


@given(load_cases())
def test_repairing_obstacle_after_obstacle_reaches_what_is_possible(case: LoadCase) -> None:
    rows = [bytearray(codes) for codes in case.lookups]
    plan = choose_load(case.geometry, case.lookups, case.bounds)
    for _ in range(sum(map(len, rows)) + 1):
        if not plan.obstacles:
            break
        for obstacle in plan.obstacles:
            rows[obstacle.group_id][obstacle.chunk] = ChunkLookup.READY
        lookups = tuple(LookupCodes(bytes(row)) for row in rows)
        repaired = choose_load(case.geometry, lookups, case.bounds)
        assert repaired.num_tokens >= plan.num_tokens
        plan = repaired

    assert plan.num_tokens == plan.possible_tokens
