"""Multi-head latent attention (MLA): the cache has one narrow vector per token for all heads.

A token's vector is its normed latent, from which every head makes its own key and value, followed
by one turned key that all heads share. There are two ways to attend, equal but for rounding:

    many new tokens   make every head's keys and values of all visible tokens, then attend
    one new token     bring the query to where the latents are, attend to them as they lie, and
                      make values of the result: nothing is made for the visible tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention

from kvstrata.engine.cache.specs import LatentSpec
from kvstrata.engine.nn.basic import RMSNorm
from kvstrata.engine.nn.cached import LatentCache
from kvstrata.engine.nn.parallel import ColumnLinear, Linear, RowLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import StepBatch

NARROW_EPS: Final = 1e-6
"""Of the norms inside attention, which do not follow the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWidths:
    """Values per token, and per head."""

    latent: int
    """Of the latent that heads make keys and values of."""
    still: int
    """Of the part of a head's key that does not depend on the position."""
    turned: int
    """Of the part that does, shared by all heads."""
    value: int

    @property
    def query(self) -> int:
        """Of a head's query or whole key."""
        return self.still + self.turned

    @property
    def cached(self) -> int:
        """Of what is kept of a token."""
        return self.latent + self.turned


class LatentAttention(nn.Module):
    """All of latent attention but how queries are made. Heads are split over the ranks.

    Args:
        hidden: width of the model.
        heads: how many, over all ranks.
        widths: what heads and the cache are made of.
        ranks: who shares it; each keeps the whole cache.
        scale: what scores are multiplied with.
        bias: whether the layers to and from the model's width have one.

    Raises:
        ModelError: heads cannot be split evenly.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        widths: HeadWidths,
        ranks: TensorParallel,
        *,
        scale: float,
        bias: bool,
    ) -> None:
        super().__init__()
        ranks.share(heads, "num_attention_heads")
        self._widths = widths
        self._scale = scale
        self.kv_a_proj_with_mqa = Linear(hidden, widths.cached, bias=bias)
        self.kv_a_layernorm = RMSNorm(widths.latent, NARROW_EPS)
        self.kv_b_proj = ColumnLinear(widths.latent, [heads * (widths.still + widths.value)], ranks)
        self.o_proj = RowLinear(heads * widths.value, hidden, ranks, bias=bias)
        self.cache = LatentCache(LatentSpec(widths.cached))

    def attend(
        self,
        query: torch.Tensor,
        x: torch.Tensor,
        batch: StepBatch,
        turn: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attend from this rank's queries, (tokens, heads * width); x is (tokens, hidden)."""
        query = self._turned_query(query, turn)
        vectors = self._vectors(x, turn)
        outputs = []
        for run, visible in zip(batch.runs, self.cache.append(vectors, batch), strict=True):
            asked = query[run.tokens].unflatten(0, (run.num_sequences, run.num_tokens))
            is_all_new = visible.mask is None
            seen = vectors[None, run.tokens] if is_all_new else self.cache.gather(visible)
            attend = self._attend_to_latents if run.num_tokens == 1 else self._attend_to_heads
            outputs.append(attend(asked, seen, visible.mask).flatten(0, 1))
        out: torch.Tensor = self.o_proj(torch.cat(outputs).flatten(1))
        return out

    def _turned_query(
        self, query: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """(tokens, heads, still + turned)."""
        heads = query.unflatten(-1, (-1, self._widths.query))
        still, turned = heads.split([self._widths.still, self._widths.turned], -1)
        return torch.cat((still, turn(turned)), -1)

    def _vectors(
        self, x: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What is kept of the new tokens: (tokens, latent + turned)."""
        both = self.kv_a_proj_with_mqa(x)
        latent, turned = both.split([self._widths.latent, self._widths.turned], -1)
        return torch.cat((self.kv_a_layernorm(latent), turn(turned[:, None])[:, 0]), -1)

    def _attend_to_heads(
        self, query: torch.Tensor, vectors: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Make keys and values first: (sequences, tokens, heads, value)."""
        widths = self._widths
        latent, turned = vectors.split([widths.latent, widths.turned], -1)
        made = self.kv_b_proj(latent).unflatten(-1, (-1, widths.still + widths.value))
        still, values = made.split([widths.still, widths.value], -1)
        keys = torch.cat((still, turned[:, :, None].expand(-1, -1, still.shape[2], -1)), -1)
        attended = scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            _widened(values, widths.query).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return attended.transpose(1, 2)[..., : widths.value]

    def _attend_to_latents(
        self, query: torch.Tensor, vectors: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend to what the cache holds; heads stand where new tokens usually do."""
        widths = self._widths
        made_by = self.kv_b_proj.weight.unflatten(0, (-1, widths.still + widths.value))
        to_keys, to_values = made_by.split([widths.still, widths.value], 1)
        still, turned = query[:, 0].split([widths.still, widths.turned], -1)
        asked = torch.cat((torch.einsum("shk,hkl->shl", still, to_keys), turned), -1)
        seen = scaled_dot_product_attention(
            asked[:, None], vectors[:, None], vectors[:, None], attn_mask=mask, scale=self._scale
        )
        values = torch.einsum("shl,hvl->shv", seen[:, 0, :, : widths.latent], to_values)
        return values[:, None]


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros added up to the width of queries: the fast kernels want both equally wide."""
    return pad(values, (0, max(0, width - values.shape[-1])))
