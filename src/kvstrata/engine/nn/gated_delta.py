"""The gated delta rule: a memory of keys and values that forgets, and corrects what it holds.

One state per value head is a matrix S, (key width, value width). Each token t does

    S <- exp(log_decay_t) * S
    S <- S + beta_t * k_t (v_t - S^T k_t)^T
    output_t = S^T q_t

Many tokens are computed in chunks. Inside a chunk the corrections depend on each other through a
lower triangular system; it is solved for all chunks at once, and only the state goes from chunk to
chunk. Everything is in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_TOKENS: Final = 64


class DeltaInputs(NamedTuple):
    """What the rule needs of each token. A key head serves as many value heads as follow it."""

    query: torch.Tensor
    """(sequences, tokens, key heads, key width), of any length: it is made one."""
    key: torch.Tensor
    """(sequences, tokens, key heads, key width), of any length: it is made one."""
    value: torch.Tensor
    """(sequences, tokens, value heads, value width)"""
    log_decay: torch.Tensor
    """(sequences, tokens, value heads), not above zero."""
    beta: torch.Tensor
    """(sequences, tokens, value heads), how much of a value is written: 0 to 1."""


class DeltaOutputs(NamedTuple):
    """What the rule gives."""

    output: torch.Tensor
    """(sequences, tokens, value heads, value width), in the dtype of the values."""
    state: torch.Tensor
    """(sequences, value heads, key width, value width), float32: after the last token."""


def gated_delta(inputs: DeltaInputs, state: torch.Tensor) -> DeltaOutputs:
    """Go on from the state before the new tokens, whatever their number."""
    if inputs.value.shape[1] == 1:
        return gated_delta_step(inputs, state)
    return gated_delta_chunks(inputs, state)


def gated_delta_step(inputs: DeltaInputs, state: torch.Tensor) -> DeltaOutputs:
    """The rule for one token of every sequence."""
    num_shared = inputs.value.shape[2] // inputs.key.shape[2]
    query, key = (
        _unit(part[:, 0]).repeat_interleave(num_shared, 1).unsqueeze(-2)
        for part in (inputs.query, inputs.key)
    )
    decay, beta = (part[:, 0, :, None, None].float() for part in (inputs.log_decay, inputs.beta))
    state = state.float() * decay.exp()
    missing = inputs.value[:, 0, :, None].float() - key @ state
    state = state + key.transpose(-1, -2) * (missing * beta)
    output = query @ state * query.shape[-1] ** -0.5
    return DeltaOutputs(output.transpose(1, 2).to(inputs.value.dtype), state)


def gated_delta_chunks(
    inputs: DeltaInputs, state: torch.Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> DeltaOutputs:
    """The rule for many tokens, chunk by chunk."""
    num_sequences, num_tokens, num_heads, width = inputs.value.shape
    chunks = _prepare(_in_chunks(inputs, min(chunk_tokens, num_tokens)))
    state = state.float().flatten(0, 1)
    corrections, outputs = [], []
    for chunk in chunks.one_by_one():
        known, recalled = (chunk.readers @ state).chunk(2, 1)
        correction = chunk.corrections - known
        state = torch.baddbmm(state * chunk.decay, chunk.writers, correction)
        corrections.append(correction)
        outputs.append(recalled)
    output = torch.stack(outputs, 1) + chunks.attention @ torch.stack(corrections, 1)
    output = output.view(num_sequences, num_heads, -1, width)[:, :, :num_tokens].transpose(1, 2)
    return DeltaOutputs(
        output.to(inputs.value.dtype), state.unflatten(0, (num_sequences, num_heads))
    )


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


class _Chunk(NamedTuple):
    """One chunk of every value head: (heads of all sequences, ...)."""

    readers: torch.Tensor
    corrections: torch.Tensor
    writers: torch.Tensor
    decay: torch.Tensor


class _Chunks(NamedTuple):
    """All that does not depend on the state: (heads of all sequences, chunks, ...)."""

    readers: torch.Tensor
    """(..., 2 * tokens, key width): reads of what a token's correction must leave out, then of
    what its query finds."""
    corrections: torch.Tensor
    """(..., tokens, value width): what each token would write if the state were zero."""
    writers: torch.Tensor
    """(..., key width, tokens): where each correction ends up at the chunk's end."""
    decay: torch.Tensor
    """(..., 1, 1): what is left of the state at the chunk's end."""
    attention: torch.Tensor
    """(..., tokens, tokens): what each query finds of the corrections in its own chunk."""

    def one_by_one(self) -> Iterator[_Chunk]:
        parts = (self.readers, self.corrections, self.writers, self.decay)
        return map(_Chunk._make, zip(*(part.unbind(1) for part in parts), strict=True))


def _in_chunks(inputs: DeltaInputs, chunk_tokens: int) -> DeltaInputs:
    """Cut tokens into chunks: (sequences, key heads, its value heads or 1, chunks, tokens, ...).

    Tokens that fill the last chunk up write nothing and forget nothing.
    """
    num_key_heads, num_tokens = inputs.key.shape[2], inputs.key.shape[1]
    short = -num_tokens % chunk_tokens

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = pad(x.float(), (*[0] * 2 * (x.dim() - 2), 0, short)).transpose(1, 2)
        chunks: torch.Tensor = x.unflatten(2, (-1, chunk_tokens))
        grouped: torch.Tensor = chunks.unflatten(1, (num_key_heads, -1))
        return grouped

    query, key = _unit(inputs.query), _unit(inputs.key)
    query *= query.shape[-1] ** -0.5
    return DeltaInputs(*(cut(part) for part in (query, key, *inputs[2:])))


def _prepare(cut: DeltaInputs) -> _Chunks:
    faded = cut.log_decay.cumsum(-1)  # from the chunk's start
    since_start = faded.exp().unsqueeze(-1)
    until_end = (faded[..., -1:] - faded).exp().unsqueeze(-1)
    between = (faded[..., :, None] - faded[..., None, :]).exp().tril()
    keys, beta = cut.key.transpose(-1, -2), cut.beta.unsqueeze(-1)
    wanted = torch.cat((cut.value, cut.key * since_start), -1) * beta
    solved = torch.linalg.solve_triangular(
        (cut.key @ keys) * between * beta, wanted, upper=False, unitriangular=True
    )
    width = cut.value.shape[-1]
    parts = (
        torch.cat((solved[..., width:], cut.query * since_start), -2),
        solved[..., :width],
        (cut.key * until_end).transpose(-1, -2),
        since_start[..., -1:, :],
        (cut.query @ keys) * between,
    )
    return _Chunks(*(part.flatten(0, 2) for part in parts))
