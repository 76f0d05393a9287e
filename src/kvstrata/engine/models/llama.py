"""Llama: full attention in every layer. Also what Mistral is built from, with a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn

from kvstrata.engine.cache.specs import AttentionSpec
from kvstrata.engine.nn.basic import GatedMLP, RMSNorm
from kvstrata.engine.nn.cached import PagedAttention
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.parallel import ColumnLinear, Embedding, RowLinear
from kvstrata.engine.nn.rotary import Rotary, rope_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import StepBatch

TINY: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Values per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        width, heads, kv_heads = config.head_width, config.num_attention_heads, config.kv_heads
        hidden, bias = config.hidden_size, config.attention_bias
        ranks.share(heads, "num_attention_heads")
        local_kv_heads = ranks.share(kv_heads, "num_key_value_heads")
        self._head_width = width
        self.q_proj = ColumnLinear(hidden, [heads * width], ranks, bias=bias)
        self.k_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.v_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.o_proj = RowLinear(heads * width, hidden, ranks, bias=bias)
        self.attention = PagedAttention(
            AttentionSpec(local_kv_heads, width, config.sliding_window), scale=width**-0.5
        )

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
        attended = self.attention(rotary(query, angles), rotary(key, angles), value, batch)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class Layer(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, ranks)
        self.mlp = GatedMLP(hidden, config.intermediate_size, ranks, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(
        self,
        x: torch.Tensor,
        batch: StepBatch,
        rotary: Rotary,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), batch, rotary, angles)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaDecoder(Decoder):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_width, rope_settings(raw))
        self.layers = nn.ModuleList(Layer(config, ranks) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids)
        angles = self.rotary.angles(batch.positions)
        for layer in self.layers:
            x = layer(x, batch, self.rotary, angles)
        out: torch.Tensor = self.norm(x)
        return out


class Model(CausalLM):
    """A Llama with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__(LlamaDecoder(config, raw, ranks), is_tied=config.tie_word_embeddings)
