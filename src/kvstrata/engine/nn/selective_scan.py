"""The recurrence of Mamba 2, many tokens at once.

Each head has a state, a matrix of values by keys. A token lets it decay, adds an outer product of
its value and its key, and reads it with its query:

    state  = exp(step * rate) * state + step * value (x) key
    output = state @ query

Tokens are taken in chunks. Inside a chunk every token reads earlier ones directly, as in attention,
so that all of it is matrix products; from chunk to chunk only the state is handed on. The size of
the chunks changes rounding and speed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_TOKENS: Final = 64


class ScanInput(NamedTuple):
    """What the tokens of some sequences bring, in float32.

    A group of heads next to each other shares keys and queries.
    """

    values: torch.Tensor
    """(sequences, tokens, heads, head_dim)"""
    steps: torch.Tensor
    """(sequences, tokens, heads): how much each token counts, from 0."""
    keys: torch.Tensor
    """(sequences, tokens, groups, state size)"""
    queries: torch.Tensor
    """(sequences, tokens, groups, state size)"""

    def chunks(self, num_tokens: int) -> Iterator[ScanInput]:
        """The same in pieces of so many tokens; the last may be shorter."""
        pieces = (part.split(num_tokens, 1) for part in self)
        return map(ScanInput._make, zip(*pieces, strict=True))


class Scanned(NamedTuple):
    """What a scan gives, in float32."""

    output: torch.Tensor
    """(sequences, tokens, heads, head_dim)"""
    state: torch.Tensor
    """(sequences, heads, head_dim, state size): the state after the tokens."""


def selective_scan(tokens: ScanInput, rates: torch.Tensor, state: torch.Tensor) -> Scanned:
    """Go on from a state over new tokens.

    Args:
        tokens: what they bring.
        rates: (heads,), how fast each head's state decays; negative.
        state: (sequences, heads, head_dim, state size), before the tokens.
    """
    if tokens.values.shape[1] == 1:
        return _scan_token(tokens, rates, state)
    outputs = []
    for chunk in tokens.chunks(_CHUNK_TOKENS):
        output, state = _scan_chunk(chunk, rates, state)
        outputs.append(output)
    return Scanned(torch.cat(outputs, 1), state)


def _scan_token(tokens: ScanInput, rates: torch.Tensor, state: torch.Tensor) -> Scanned:
    """One token of each sequence: the recurrence as it is written."""
    value, step, key, query = (part[:, 0] for part in tokens)
    heads_per_group = value.shape[1] // key.shape[1]
    key, query = (part.repeat_interleave(heads_per_group, 1) for part in (key, query))
    decay = (step * rates).exp()[..., None, None]
    state = state * decay + (value * step[..., None])[..., None] * key[:, :, None]
    return Scanned((state @ query[..., None])[..., 0][:, None], state)


def _scan_chunk(chunk: ScanInput, rates: torch.Tensor, state: torch.Tensor) -> Scanned:
    decay = (chunk.steps * rates).cumsum(1)  # (sequences, tokens, heads), from the chunk's start
    chunk = chunk._replace(values=chunk.values * chunk.steps[..., None])
    output = _from_tokens(chunk, decay) + _from_state(chunk.queries, state) * decay.exp()[..., None]
    left = decay[:, -1].exp()[..., None, None]
    return Scanned(output, state * left + _gained(chunk, decay))


def _from_tokens(chunk: ScanInput, decay: torch.Tensor) -> torch.Tensor:
    """What tokens read of each other: (sequences, tokens, heads, head_dim)."""
    num_groups = chunk.keys.shape[2]
    scores = chunk.queries.transpose(1, 2) @ chunk.keys.permute(0, 2, 3, 1)
    weights = _between(decay).unflatten(1, (num_groups, -1)) * scores[:, :, None]
    read: torch.Tensor = weights.flatten(1, 2) @ chunk.values.transpose(1, 2)
    return read.transpose(1, 2)


def _between(decay: torch.Tensor) -> torch.Tensor:
    """What is left of each token at each later one, zero at earlier ones: (.., heads, to, from)."""
    decay = decay.transpose(1, 2)
    num_tokens = decay.shape[-1]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=decay.device).triu(1)
    # Before exp: the decay "back in time" grows without bound.
    return (decay[..., None] - decay[..., None, :]).masked_fill_(is_later, -torch.inf).exp_()


def _from_state(queries: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What tokens read of the state before the chunk: (sequences, tokens, heads, head_dim)."""
    by_group = state.unflatten(1, (queries.shape[2], -1)).flatten(2, 3)
    read: torch.Tensor = queries.transpose(1, 2) @ by_group.transpose(-1, -2)
    return read.transpose(1, 2).reshape(*queries.shape[:2], *state.shape[1:3])


def _gained(chunk: ScanInput, decay: torch.Tensor) -> torch.Tensor:
    """What the chunk's tokens leave in the state: (sequences, heads, head_dim, state size)."""
    left = (decay[:, -1:] - decay).exp()
    values = (chunk.values * left[..., None]).unflatten(2, (chunk.keys.shape[2], -1)).flatten(3)
    gained: torch.Tensor = values.permute(0, 2, 3, 1) @ chunk.keys.transpose(1, 2)
    return gained.reshape(gained.shape[0], *chunk.values.shape[2:], -1)
