"""LFM2: most layers are a short gated convolution, a few are full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn
from torch.nn.functional import silu

from kvstrata.engine.cache.specs import AttentionSpec, StatePart, StateSpec
from kvstrata.engine.nn.basic import RMSNorm
from kvstrata.engine.nn.cached import PagedAttention, StateCache
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.parallel import ColumnLinear, Embedding, RowLinear
from kvstrata.engine.nn.rotary import Rotary, rope_settings
from kvstrata.engine.nn.short_conv import ShortConv
from kvstrata.engine.tiny import draw_weight
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import StepBatch

TINY: Final[dict[str, Any]] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "num_hidden_layers": 8,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}

_EMBEDDING_SIZE: Final = 0.25
"""Of the entries of a tiny checkpoint's embedding. Where it is the head too, larger ones would have
each token answered by itself."""
_CONV: Final = "conv"
_ATTENTION: Final = "full_attention"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    vocab_size: int = 65_536
    hidden_size: int = 2560
    intermediate_size: int = 12_288
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    norm_eps: float = 1e-5
    conv_bias: bool = False
    conv_L_cache: int = 3  # noqa: N815 - the name in config.json
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    """Says the same as `tie_word_embeddings`, in older checkpoints."""
    block_ff_dim: int | None = None
    """Says the same as `intermediate_size`, in older checkpoints."""

    @property
    def head_width(self) -> int:
        """Values per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head too."""
        return self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding

    @property
    def feed_forward_width(self) -> int:
        """The width inside a feed-forward layer: two thirds, scaled, rounded up, where asked."""
        width = self.intermediate_size if self.block_ff_dim is None else self.block_ff_dim
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if self.block_ffn_dim_multiplier is None:
            return width
        width = int(self.block_ffn_dim_multiplier * width)
        return -(-width // self.block_multiple_of) * self.block_multiple_of


def layer_kinds(config: Config) -> Sequence[str]:
    """What each layer is, from the names of all or the places of the attention layers.

    Raises:
        ModelError: a name is not known, or there are not as many as layers.
    """
    count = config.num_hidden_layers
    kinds = config.layer_types
    if kinds is None:
        places = range(count) if config.full_attn_idxs is None else config.full_attn_idxs
        return [_ATTENTION if index in places else _CONV for index in range(count)]
    if unknown := set(kinds) - {_CONV, _ATTENTION}:
        raise ModelError(
            f"config.json: layer_types has {', '.join(map(repr, sorted(unknown)))}; "
            f"accepted: {_CONV}, {_ATTENTION}"
        )
    if len(kinds) != count:
        raise ModelError(
            f"config.json: layer_types has {len(kinds)} entries; num_hidden_layers is {count}"
        )
    return kinds


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One weight of a tiny checkpoint."""
    weight = draw_weight(name, shape, generator)
    return weight * _EMBEDDING_SIZE if name.endswith("embed_tokens.weight") else weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries and keys are normed head by head."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.head_width, config.norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        ranks.share(heads, "num_attention_heads")
        local_kv_heads = ranks.share(kv_heads, "num_key_value_heads")
        self._head_width = width
        self.q_proj = ColumnLinear(hidden, [heads * width], ranks)
        self.k_proj = ColumnLinear(hidden, [kv_heads * width], ranks)
        self.v_proj = ColumnLinear(hidden, [kv_heads * width], ranks)
        self.out_proj = RowLinear(heads * width, hidden, ranks)
        self.q_layernorm = RMSNorm(width, eps)
        self.k_layernorm = RMSNorm(width, eps)
        self.attention = PagedAttention(AttentionSpec(local_kv_heads, width), scale=width**-0.5)

    def forward(
        self,
        x: torch.Tensor,
        batch: StepBatch,
        rotary: Rotary,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend from (tokens, hidden)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self._head_width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotary(self.q_layernorm(query), angles)
        key = rotary(self.k_layernorm(key), angles)
        out: torch.Tensor = self.out_proj(self.attention(query, key, value, batch).flatten(1))
        return out


class GatedConv(nn.Module):
    """after * conv(before * x): a short convolution between two gates, all made of the input."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        ranks.share(hidden, "hidden_size")
        self.in_proj = ColumnLinear(hidden, [hidden] * 3, ranks, bias=bias)
        self.conv = ShortConv([hidden], config.conv_L_cache, ranks, bias=bias)
        self.out_proj = RowLinear(hidden, hidden, ranks, bias=bias)
        state = StatePart(self.conv.state_shape, torch.get_default_dtype())
        self.cache = StateCache(StateSpec((state,)))

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Convolve (tokens, hidden), each sequence going on where it stopped."""
        before, after, x = self.in_proj(x).chunk(3, -1)
        x = before * x
        outputs = []
        for run, states in zip(batch.runs, self.cache.runs(batch), strict=True):
            (state,) = self.cache.load(states)
            packed = x[run.tokens].unflatten(0, (run.num_sequences, run.num_tokens))
            convolved, state = self.conv(packed, state)
            self.cache.keep(states, [state])
            outputs.append(convolved.flatten(0, 1))
        out: torch.Tensor = self.out_proj(after * torch.cat(outputs))
        return out


class FeedForward(nn.Module):
    """w2(silu(w1(x)) * w3(x)), split over the ranks."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.feed_forward_width
        self.w1 = ColumnLinear(hidden, [width], ranks)
        self.w3 = ColumnLinear(hidden, [width], ranks)
        self.w2 = RowLinear(width, hidden, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, equal on every rank."""
        out: torch.Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """Attention or a convolution, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Config, kind: str, ranks: TensorParallel) -> None:
        super().__init__()
        if kind == _ATTENTION:
            self.self_attn = Attention(config, ranks)
        else:
            self.conv = GatedConv(config, ranks)
        self._is_attention = kind == _ATTENTION
        self.feed_forward = FeedForward(config, ranks)
        self.operator_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        batch: StepBatch,
        rotary: Rotary,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        normed = self.operator_norm(x)
        if self._is_attention:
            x = x + self.self_attn(normed, batch, rotary, angles)
        else:
            x = x + self.conv(normed, batch)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Lfm2Decoder(Decoder):
    """Embedding, layers and the last norm, which checkpoints call `embedding_norm`."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_width, rope_settings(raw, rope_theta=1_000_000.0))
        self.layers = nn.ModuleList(Layer(config, kind, ranks) for kind in layer_kinds(config))
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids)
        angles = self.rotary.angles(batch.positions)
        for layer in self.layers:
            x = layer(x, batch, self.rotary, angles)
        out: torch.Tensor = self.embedding_norm(x)
        return out


class Model(CausalLM):
    """An LFM2 with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__(Lfm2Decoder(config, raw, ranks), is_tied=config.is_tied)
