"""From a step's sequences to the tensors that layers see."""

from __future__ import annotations

from array import array
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, whole_units
from kvstrata.engine.nn.step import (
    AttentionRun,
    AttentionTables,
    Run,
    StateRun,
    StateTables,
    StepBatch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.layout import KVGroup, KVLayout
    from kvstrata.engine.scheduling.step import ScheduledSequence


class _Members(NamedTuple):
    """The sequences of one run: [first, last)."""

    first: int
    last: int


def in_runs(sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """The order `make_batch` wants: decoding sequences first, so that they form one run."""
    return sorted(sequences, key=lambda sequence: len(sequence.token_ids) > 1)


def make_batch(
    layout: KVLayout, sequences: Sequence[ScheduledSequence], device: str = "cpu"
) -> StepBatch:
    """Pack a step's tokens and look up where each group has them."""
    runs = _runs(sequences)
    token_ids = array("q", chain.from_iterable(s.token_ids for s in sequences))
    positions = torch.cat([torch.arange(s.start, s.stop) for s in sequences])
    return StepBatch(
        token_ids=torch.frombuffer(token_ids, dtype=torch.int64).to(device),
        positions=positions.to(device),
        runs=tuple(_run(sequences, run) for run in runs),
        tables=tuple(
            _state_tables(group, index, sequences, runs, device)
            if group.kind is GroupKind.RECURRENT
            else _attention_tables(group, index, sequences, runs, device)
            for index, group in enumerate(layout.groups)
        ),
    )


def _runs(sequences: Sequence[ScheduledSequence]) -> list[_Members]:
    num_decodes = sum(len(sequence.token_ids) == 1 for sequence in sequences)
    edges = [*range(min(1, num_decodes)), *range(num_decodes, len(sequences) + 1)]
    return [_Members(first, last) for first, last in pairwise(edges)]


def _run(sequences: Sequence[ScheduledSequence], run: _Members) -> Run:
    start = sum(len(sequence.token_ids) for sequence in sequences[: run.first])
    length, count = len(sequences[run.first].token_ids), run.last - run.first
    return Run(slice(start, start + count * length), count, length)


def _attention_tables(
    group: KVGroup,
    index: int,
    sequences: Sequence[ScheduledSequence],
    runs: Sequence[_Members],
    device: str,
) -> AttentionTables:
    views = [_Visible(group, sequence, sequence.tables[index]) for sequence in sequences]
    return AttentionTables(
        slots=torch.cat([view.slots() for view in views]).to(device),
        runs=tuple(_attention_run(views[run.first : run.last], device) for run in runs),
    )


class _Visible:
    """What one sequence may look at in one attention group: rows from `first_row` on."""

    def __init__(self, group: KVGroup, sequence: ScheduledSequence, table: Sequence[int]) -> None:
        self._row_tokens = group.cut_tokens
        self._window = group.window_tokens or sequence.stop
        self._start, self._stop = sequence.start, sequence.stop
        first_token = max(0, sequence.start - self._window + 1)
        self.first_row = whole_units(first_token, group.cut_tokens)
        blocks = torch.tensor(table)
        rows = blocks[:, None] * group.rows_per_block + torch.arange(group.rows_per_block)
        self.rows = rows.flatten()[self.first_row : ceil_div(sequence.stop, group.cut_tokens)]

    @property
    def first_position(self) -> int:
        """The position of the first key."""
        return self.first_row * self._row_tokens

    @property
    def num_keys(self) -> int:
        """Tokens in the rows."""
        return self._stop - self.first_position

    @property
    def is_all_new(self) -> bool:
        """Whether the new tokens see nothing but new tokens, each all up to itself."""
        return self._start == 0 and self._stop <= self._window

    def slots(self) -> torch.Tensor:
        """Where the new tokens go."""
        places = torch.arange(self._start, self._stop) - self.first_position
        rows = self.rows[places.div(self._row_tokens, rounding_mode="floor")]
        return rows * self._row_tokens + places % self._row_tokens

    def mask(self, num_keys: int) -> torch.Tensor:
        """(new tokens, keys): who sees whom."""
        queries = torch.arange(self._start, self._stop)[:, None]
        keys = torch.arange(num_keys) + self.first_position
        return (keys <= queries) & (keys > queries - self._window)


def _attention_run(views: Sequence[_Visible], device: str) -> AttentionRun:
    num_keys = max(view.num_keys for view in views)
    rows = pad_sequence([view.rows for view in views], batch_first=True)
    if len(views) == 1 and views[0].is_all_new:
        return AttentionRun(rows.to(device), num_keys, None)
    mask = torch.stack([view.mask(num_keys) for view in views])[:, None]
    return AttentionRun(rows.to(device), num_keys, mask.to(device))


def _state_tables(
    group: KVGroup,
    index: int,
    sequences: Sequence[ScheduledSequence],
    runs: Sequence[_Members],
    device: str,
) -> StateTables:
    return StateTables(
        tuple(
            _state_run(group.block_tokens, index, sequences[run.first : run.last], device)
            for run in runs
        )
    )


def _state_run(
    block_tokens: int, index: int, sequences: Sequence[ScheduledSequence], device: str
) -> StateRun:
    """The state after n tokens rests in the block that token n - 1 falls into."""
    sources, targets = [], []
    for sequence in sequences:
        table = sequence.tables[index]
        is_fresh = sequence.start == 0
        sources.append(0 if is_fresh else table[whole_units(sequence.start - 1, block_tokens)])
        targets.append(table[whole_units(sequence.stop - 1, block_tokens)])
    return StateRun(
        sources=torch.tensor(sources, device=device),
        is_fresh=torch.tensor([s.start == 0 for s in sequences], device=device),
        targets=torch.tensor(targets, device=device),
    )
