"""Gemma 3, text alone: most layers look at a window, some at everything; norms on both sides."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn
from torch.nn.functional import gelu

from kvstrata.engine.cache.specs import AttentionSpec
from kvstrata.engine.models.settings import accept
from kvstrata.engine.nn.basic import GatedMLP, RMSNorm
from kvstrata.engine.nn.cached import PagedAttention
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.parallel import ColumnLinear, Embedding, RowLinear
from kvstrata.engine.nn.rotary import Rotary, rope_settings
from kvstrata.engine.tiny import draw_weight
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.rotary import RopeSettings
    from kvstrata.engine.nn.step import StepBatch

    Turn = Callable[[torch.Tensor], torch.Tensor]

WINDOW: Final = "sliding_attention"
FULL: Final = "full_attention"

TINY: Final[dict[str, Any]] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "layer_types": [WINDOW, WINDOW, WINDOW, FULL] * 2,
    "rope_parameters": {
        WINDOW: {"rope_theta": 10_000.0, "rope_type": "default"},
        FULL: {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 8.0},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 4
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    hidden_activation: str = "gelu_pytorch_tanh"
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def __post_init__(self) -> None:
        accept("hidden_activation", self.hidden_activation, ["gelu_pytorch_tanh"])
        accept("attn_logit_softcapping", self.attn_logit_softcapping, [None])
        accept("final_logit_softcapping", self.final_logit_softcapping, [None])
        accept("use_bidirectional_attention", self.use_bidirectional_attention, [False, None])
        for kind in self.kinds:
            accept("an entry of layer_types", kind, [WINDOW, FULL])
        if len(self.kinds) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types has {len(self.kinds)} entries; expected num_hidden_layers, "
                f"{self.num_hidden_layers}"
            )

    @property
    def kinds(self) -> Sequence[str]:
        """What each layer looks at."""
        if self.layer_types is not None:
            return self.layer_types
        return [
            WINDOW if number % self.sliding_window_pattern else FULL
            for number in range(1, self.num_hidden_layers + 1)
        ]


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One weight: norms lie around zero, and the scale of embeddings is taken out.

    Two kinds of norms are larger, or greedy answers would repeat one token: those behind layers,
    since the embedding that comes in is also what scores tokens, and those of queries and keys,
    since attention that looks at everything alike changes little from token to token.
    """
    if "norm" not in name and "embed" not in name:
        return draw_weight(name, shape, generator)
    noise = torch.randn(shape, generator=generator)
    if "embed" in name:
        return noise / math.sqrt(shape[-1])
    if "post_" in name:
        return 1.0 + noise * 0.1
    return noise * 0.1 + (0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0)


def rope_of(raw: Mapping[str, Any], kind: str) -> RopeSettings:
    """How positions turn in layers of this kind, from the newer or the older keys.

    Raises:
        ModelError: `rope_parameters` is not split by kind of layer.
    """
    by_kind = raw.get("rope_parameters") or {}
    if by_kind.keys() - {WINDOW, FULL}:
        raise ModelError(
            f"config.json: rope_parameters has keys {sorted(by_kind)}; accepted: {FULL}, {WINDOW}"
        )
    if kind == WINDOW:
        found = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    else:
        found = {
            "rope_theta": raw.get("rope_theta", 1_000_000.0),
            **(raw.get("rope_scaling") or {}),
        }
    shared = {key: raw[key] for key in ("max_position_embeddings",) if key in raw}
    return rope_settings(shared | {"rope_parameters": found | (by_kind.get(kind) or {})})


class ScaledEmbedding(Embedding):
    """A table of vectors that are made longer on their way in, but not when they score."""

    def __init__(self, num_entries: int, width: int) -> None:
        super().__init__(num_entries, width)
        self._scale = math.sqrt(width)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The scaled vectors; the scale is rounded as the weights are."""
        scale = torch.tensor(self._scale, dtype=torch.float32).to(self.weight.dtype)
        return super().forward(token_ids) * scale


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: Config, kind: str, ranks: TensorParallel) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, hidden, bias = config.head_dim, config.hidden_size, config.attention_bias
        ranks.share(heads, "num_attention_heads")
        local_kv_heads = ranks.share(kv_heads, "num_key_value_heads")
        self._head_width = width
        self.q_proj = ColumnLinear(hidden, [heads * width], ranks, bias=bias)
        self.k_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.v_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.o_proj = RowLinear(heads * width, hidden, ranks, bias=bias)
        self.q_norm = _norm(width, config)
        self.k_norm = _norm(width, config)
        window = config.sliding_window if kind == WINDOW else None
        self.attention = PagedAttention(
            AttentionSpec(local_kv_heads, width, window), scale=config.query_pre_attn_scalar**-0.5
        )

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Attend from (tokens, hidden)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self._head_width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = turn(self.q_norm(query)), turn(self.k_norm(key))
        out: torch.Tensor = self.o_proj(self.attention(query, key, value, batch).flatten(1))
        return out


class Layer(nn.Module):
    """Attention, then a feed-forward layer, each between two norms."""

    def __init__(self, config: Config, kind: str, ranks: TensorParallel) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config, kind, ranks)
        self.mlp = GatedMLP(
            hidden, config.intermediate_size, ranks, activation=partial(gelu, approximate="tanh")
        )
        self.input_layernorm = _norm(hidden, config)
        self.post_attention_layernorm = _norm(hidden, config)
        self.pre_feedforward_layernorm = _norm(hidden, config)
        self.post_feedforward_layernorm = _norm(hidden, config)

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        attended = self.self_attn(self.input_layernorm(x), batch, turn)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        out: torch.Tensor = x + self.post_feedforward_layernorm(fed)
        return out


class Gemma3Decoder(Decoder):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.window_rotary = Rotary(config.head_dim, rope_of(raw, WINDOW))
        self.full_rotary = Rotary(config.head_dim, rope_of(raw, FULL))
        self._kinds = config.kinds
        self.layers = nn.ModuleList(Layer(config, kind, ranks) for kind in config.kinds)
        self.norm = _norm(config.hidden_size, config)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids)
        turns = {
            WINDOW: _turn(self.window_rotary, batch),
            FULL: _turn(self.full_rotary, batch),
        }
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            x = layer(x, batch, turns[kind])
        out: torch.Tensor = self.norm(x)
        return out


class Model(CausalLM):
    """A Gemma 3 with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__(Gemma3Decoder(config, raw, ranks), is_tied=config.tie_word_embeddings)


def _norm(width: int, config: Config) -> RMSNorm:
    """A norm whose weights are kept around zero."""
    return RMSNorm(width, config.rms_norm_eps, offset=1.0)


def _turn(rotary: Rotary, batch: StepBatch) -> Turn:
    return partial(rotary, angles=rotary.angles(batch.positions))
