"""Layers that keep something for later tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.engine.nn.step import AttentionTables, StateTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.engine.cache.specs import AttentionSpec, CacheSpec, LatentSpec, StateSpec
    from kvstrata.engine.nn.step import AttentionRun, StateRun, StepBatch


class CachedLayer(nn.Module):
    """A layer with a cache: says what it needs, and is given tensors before the first step.

    Ownership: the tensors belong to the runner; layers of other groups lie over the same memory.
    """

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._group = 0

    def bind(self, tensors: Sequence[torch.Tensor], group: int) -> None:
        """Use these tensors from now on, with the tables of this group."""
        self._tensors, self._group = tuple(tensors), group


class PagedAttention(CachedLayer):
    """Attention of new tokens to everything their sequences have in the cache.

    Args:
        spec: what is kept of each token.
        scale: what scores are multiplied with.
    """

    def __init__(self, spec: AttentionSpec, *, scale: float) -> None:
        super().__init__(spec)
        self._scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """Keep keys and values, then attend; all are (tokens, heads, head_dim)."""
        (cache,) = self._tensors
        tables = batch.tables[self._group]
        assert isinstance(tables, AttentionTables)
        row, place = _rows_and_places(tables.slots, cache.shape[2])
        cache[row, 0, place] = key
        cache[row, 1, place] = value
        outputs = []
        for run, visible in zip(batch.runs, tables.runs, strict=True):
            shape = (run.num_sequences, run.num_tokens)
            if visible.mask is None:
                keys, values = key[None, run.tokens], value[None, run.tokens]
            else:
                keys, values = self._gather(visible)
            outputs.append(
                self._attend(query[run.tokens].unflatten(0, shape), keys, values, visible.mask)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather(self, visible: AttentionRun) -> tuple[torch.Tensor, torch.Tensor]:
        """The visible keys and values: (sequences, keys, heads, head_dim) each."""
        pages = self._tensors[0][visible.rows]  # (sequences, rows, 2, row tokens, heads, dim)
        keys, values = (pages[:, :, part].flatten(1, 2)[:, : visible.num_keys] for part in (0, 1))
        return keys, values

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        attended = scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[2] != keys.shape[2],
        )
        return attended.transpose(1, 2).flatten(0, 1)


class LatentCache(CachedLayer):
    """Keeps one vector per token and hands back those a run may look at (MLA).

    Args:
        spec: how wide the vectors are.
    """

    def __init__(self, spec: LatentSpec) -> None:
        super().__init__(spec)

    def append(self, latent: torch.Tensor, batch: StepBatch) -> tuple[AttentionRun, ...]:
        """Keep the vectors of the new tokens, (tokens, width); what each run may look at."""
        (cache,) = self._tensors
        tables = batch.tables[self._group]
        assert isinstance(tables, AttentionTables)
        row, place = _rows_and_places(tables.slots, cache.shape[1])
        cache[row, place] = latent
        return tables.runs

    def gather(self, visible: AttentionRun) -> torch.Tensor:
        """The visible vectors: (sequences, keys, width)."""
        return self._tensors[0][visible.rows].flatten(1, 2)[:, : visible.num_keys]


class StateCache(CachedLayer):
    """Keeps recurrent states.

    Args:
        spec: the parts of one state.
    """

    def __init__(self, spec: StateSpec) -> None:
        super().__init__(spec)

    def runs(self, batch: StepBatch) -> tuple[StateRun, ...]:
        """Where each run's states come from and go to."""
        tables = batch.tables[self._group]
        assert isinstance(tables, StateTables)
        return tables.runs

    def load(self, run: StateRun) -> list[torch.Tensor]:
        """The states before the new tokens, part by part: (sequences, *shape) each."""
        states = [part[run.sources] for part in self._tensors]
        for state in states:
            state[run.is_fresh] = 0
        return states

    def keep(self, run: StateRun, states: Sequence[torch.Tensor]) -> None:
        """Keep the states after the new tokens."""
        for part, state in zip(self._tensors, states, strict=True):
            part[run.targets] = state.to(part.dtype)


def _rows_and_places(slots: torch.Tensor, row_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // row_tokens, slots % row_tokens
