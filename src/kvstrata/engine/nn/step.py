"""What layers see of one step: packed tokens, and where each group's cache has them.

A step computes some new tokens of several sequences. Sequences with equally many new tokens are
gathered into *runs*: all decoding sequences are one run of one token each, every prefill is a run
of its own. Layers with a cache go through the runs; all others work on the packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences that have equally many new tokens, next to each other in the step."""

    tokens: slice
    """Their place among the packed tokens."""
    num_sequences: int
    num_tokens: int
    """New tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """What the sequences of a run may look at in one group."""

    rows: torch.Tensor
    """(sequences, rows): kernel blocks in the order of their tokens; row 0 where there is none."""
    num_keys: int
    """How many tokens of those rows are looked at; the rest is padding."""
    mask: torch.Tensor | None
    """(sequences, 1, new tokens, keys): which keys each new token sees. None: the keys are the new
    tokens themselves, and each sees those up to itself."""


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """One attention group's view of the step."""

    slots: torch.Tensor
    """(tokens,): where each new token's entry goes: kernel block * its tokens + place in it."""
    runs: tuple[AttentionRun, ...]


@dataclass(frozen=True, slots=True)
class StateRun:
    """Where the states of a run's sequences come from and go to, in one group."""

    sources: torch.Tensor
    """(sequences,): the block with the state before the new tokens."""
    is_fresh: torch.Tensor
    """(sequences,): whether there is no state yet, and zeros stand for it."""
    targets: torch.Tensor
    """(sequences,): the block for the state after the new tokens."""


@dataclass(frozen=True, slots=True)
class StateTables:
    """One recurrent group's view of the step."""

    runs: tuple[StateRun, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The input of a model for one step."""

    token_ids: torch.Tensor
    """(tokens,)"""
    positions: torch.Tensor
    """(tokens,)"""
    runs: tuple[Run, ...]
    tables: tuple[AttentionTables | StateTables, ...]
    """By group."""
