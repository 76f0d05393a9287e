"""Granite 4: most layers are Mamba 2 mixers, a few are full attention, all with shared experts."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import torch
from torch import nn
from torch.nn.functional import silu

from kvstrata.engine.cache.specs import AttentionSpec
from kvstrata.engine.nn.basic import RMSNorm
from kvstrata.engine.nn.cached import PagedAttention
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.mamba2 import Mamba2, MixerShape
from kvstrata.engine.nn.packed_experts import PackedExperts
from kvstrata.engine.nn.parallel import ColumnLinear, Embedding, RowLinear
from kvstrata.engine.nn.rotary import Rotary, rope_settings
from kvstrata.engine.tiny import draw_weight
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import StepBatch

    Turn = Callable[[torch.Tensor], torch.Tensor]

TINY: Final[dict[str, Any]] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 8,
    "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.75,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}

Positive = Annotated[int, msgspec.Meta(ge=1)]

_MIXERS: Final = ("mamba", "linear_attention")
_ATTENTIONS: Final = ("attention", "full_attention")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    shared_intermediate_size: int = 1024
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    normalization_function: str = "rmsnorm"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    position_embedding_type: str | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    """Says the same as `layer_types`."""
    mamba_n_heads: Positive = 128
    mamba_n_groups: Positive = 1
    mamba_d_state: int = 256
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float | dict[str, str]] | None = None
    """Two bounds. One that JSON has no number for may be written as {"__float__": "Infinity"}."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Values per head of attention."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def check_config(config: Config) -> None:
    """Refuse what would be computed differently.

    Raises:
        ModelError: names the key and what is accepted.
    """
    _accept("hidden_act", config.hidden_act, ("silu",))
    _accept("normalization_function", config.normalization_function, ("rmsnorm",))
    _accept("position_embedding_type", config.position_embedding_type, (None, "nope", "rope"))
    heads, groups = config.mamba_n_heads, config.mamba_n_groups
    if heads % groups:
        raise ModelError(
            f"config.json: mamba_n_groups is {groups}; accepted: a divisor of mamba_n_heads, "
            f"which is {heads}"
        )
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    if experts > 0 and not 1 <= chosen <= experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {chosen}; accepted: 1 to num_local_experts, "
            f"which is {experts}"
        )


def _accept(key: str, value: str | None, accepted: Collection[str | None]) -> None:
    if value not in accepted:
        names = ", ".join(name or "null" for name in accepted)
        raise ModelError(f"config.json: {key} is {value!r}; accepted: {names}")


def layer_kinds(config: Config) -> Sequence[str]:
    """What each layer is.

    Raises:
        ModelError: a name is not known, or there are not as many as layers.
    """
    count = config.num_hidden_layers
    kinds = config.layer_types or config.layers_block_type or [_MIXERS[0]] * count
    for kind in kinds:
        _accept("layer_types", kind, _MIXERS + _ATTENTIONS)
    if len(kinds) != count:
        raise ModelError(
            f"config.json: layer_types has {len(kinds)} entries; num_hidden_layers is {count}"
        )
    return kinds


def mixer_shape(config: Config) -> MixerShape:
    """The sizes of the mixers.

    Raises:
        ModelError: heads of that size do not make up the inner width.
    """
    inner, heads = config.mamba_expand * config.hidden_size, config.mamba_n_heads
    head_dim = inner // heads if config.mamba_d_head == "auto" else config.mamba_d_head
    if head_dim * heads != inner:
        raise ModelError(
            f"config.json: mamba_d_head is {config.mamba_d_head} and mamba_n_heads is {heads}; "
            f"their product must be mamba_expand * hidden_size, which is {inner}"
        )
    return MixerShape(
        hidden=config.hidden_size,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        kernel=config.mamba_d_conv,
        has_conv_bias=config.mamba_conv_bias,
        has_proj_bias=config.mamba_proj_bias,
        eps=config.rms_norm_eps,
        step_limits=_step_limits(config.time_step_limit),
    )


def _step_limits(limits: Sequence[float | dict[str, str]] | None) -> tuple[float, float]:
    """The bounds of a token's step; a bound may be tagged, see `Config.time_step_limit`."""
    if limits is None:
        return 0.0, math.inf
    try:
        low, high = (
            float(bound["__float__"]) if isinstance(bound, dict) else bound for bound in limits
        )
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"config.json: time_step_limit is {limits}; accepted: two numbers"
        ) from error
    return low, high


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One weight of a tiny checkpoint: states keep some tens of tokens and outweigh the skip."""
    even = torch.rand(shape, generator=generator)
    if name.endswith("A_log"):
        return (0.05 + 0.95 * even).log()
    if name.endswith("dt_bias"):
        return (0.05 + 0.25 * even).expm1().log()  # steps of 0.05 to 0.3 where the input is zero
    weight = draw_weight(name, shape, generator)
    return weight * 0.25 if name.endswith(("embed_tokens.weight", "mamba.D")) else weight


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions or none."""

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
            AttentionSpec(local_kv_heads, width), scale=config.attention_multiplier
        )

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Attend from (tokens, hidden); `turn` gives queries and keys their positions."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self._head_width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = self.attention(turn(query), turn(key), value, batch)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class SharedMLP(nn.Module):
    """The feed-forward layer that every token goes through."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.shared_intermediate_size
        self.input_linear = ColumnLinear(hidden, [width, width], ranks)
        self.output_linear = RowLinear(width, hidden, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, equal on every rank."""
        gate, up = self.input_linear(x).chunk(2, -1)
        out: torch.Tensor = self.output_linear(silu(gate) * up)
        return out


class Layer(nn.Module):
    """A mixer or attention, then feed-forward layers; what they add is scaled."""

    def __init__(self, config: Config, kind: str, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._scale = config.residual_multiplier
        self._is_attention = kind in _ATTENTIONS
        if self._is_attention:
            self.self_attn = Attention(config, ranks)
        else:
            self.mamba = Mamba2(mixer_shape(config), ranks)
        self._is_sparse = config.num_local_experts > 0
        if self._is_sparse:
            self.block_sparse_moe = PackedExperts(
                hidden,
                config.intermediate_size,
                ranks,
                count=config.num_local_experts,
                num_chosen=config.num_experts_per_tok,
            )
        self.shared_mlp = SharedMLP(config, ranks)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        normed = self.input_layernorm(x)
        if self._is_attention:
            x = x + self.self_attn(normed, batch, turn) * self._scale
        else:
            x = x + self.mamba(normed, batch) * self._scale
        out: torch.Tensor = x + self._feed_forward(self.post_attention_layernorm(x)) * self._scale
        return out

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = self.shared_mlp(x)
        return self.block_sparse_moe(x) + shared if self._is_sparse else shared


class GraniteDecoder(Decoder):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        self._embedding_scale = config.embedding_multiplier
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary: Rotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = Rotary(config.head_width, rope_settings(raw))
        self.layers = nn.ModuleList(Layer(config, kind, ranks) for kind in layer_kinds(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids) * self._embedding_scale
        turn = self._turn(batch.positions)
        for layer in self.layers:
            x = layer(x, batch, turn)
        out: torch.Tensor = self.norm(x)
        return out

    def _turn(self, positions: torch.Tensor) -> Turn:
        """How queries and keys get their positions."""
        if self.rotary is None:
            return lambda unturned: unturned
        return partial(self.rotary, angles=self.rotary.angles(positions))


class Model(CausalLM):
    """A Granite 4 with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.

    Raises:
        ModelError: a setting is not supported.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        check_config(config)
        super().__init__(GraniteDecoder(config, raw, ranks), is_tied=config.tie_word_embeddings)
        self._logits_scaling = config.logits_scaling

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary."""
        return super().logits(hidden) / self._logits_scaling
