"""DeepSeek V3: latent attention (MLA), and experts in all but the first layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn
from torch.nn.functional import linear

from kvstrata.engine.models.settings import accept
from kvstrata.engine.nn.basic import GatedMLP, RMSNorm
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.experts import Choice, Experts, choose_experts
from kvstrata.engine.nn.latent_attention import NARROW_EPS, HeadWidths, LatentAttention
from kvstrata.engine.nn.parallel import ColumnLinear, Embedding, Linear
from kvstrata.engine.nn.rotary import Rotary, rope_settings
from kvstrata.engine.nn.yarn import stretch
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.rotary import RopeSettings
    from kvstrata.engine.nn.step import StepBatch

    Turn = Callable[[torch.Tensor], torch.Tensor]

TINY: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 10_000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True

    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5

    def __post_init__(self) -> None:
        accept("hidden_act", self.hidden_act, ["silu"])
        heads = self.num_attention_heads
        accept("num_key_value_heads", self.num_key_value_heads, [heads, None])
        accept("moe_layer_freq", self.moe_layer_freq, [1])
        accept("scoring_func", self.scoring_func, ["sigmoid"])
        accept("topk_method", self.topk_method, ["noaux_tc"])
        self._check_groups()

    def _check_groups(self) -> None:
        group_size, left_over = divmod(self.n_routed_experts, self.n_group)
        if left_over or group_size < 2:  # noqa: PLR2004 - a group counts by its two best
            raise ModelError(
                f"n_group is {self.n_group}; expected groups of two or more that "
                f"n_routed_experts, {self.n_routed_experts}, can be split into evenly"
            )
        if not self.num_experts_per_tok <= self.topk_group * group_size <= self.n_routed_experts:
            raise ModelError(
                f"topk_group is {self.topk_group}; expected at most n_group, {self.n_group}, and "
                f"room for num_experts_per_tok, {self.num_experts_per_tok}"
            )

    @property
    def widths(self) -> HeadWidths:
        """What heads and the cache are made of."""
        return HeadWidths(
            latent=self.kv_lora_rank,
            still=self.qk_nope_head_dim,
            turned=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )


def attention_scale(config: Config, rope: RopeSettings) -> float:
    """What scores are multiplied with; more than usual where positions are slowed down."""
    scale: float = config.widths.query**-0.5
    if rope.rope_type != "default" and rope.mscale_all_dim:
        scale *= stretch(rope.factor, rope.mscale_all_dim) ** 2
    return scale


class Attention(LatentAttention):
    """Latent attention; queries may go through a narrow layer first."""

    def __init__(self, config: Config, scale: float, ranks: TensorParallel) -> None:
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        super().__init__(
            hidden, heads, config.widths, ranks, scale=scale, bias=config.attention_bias
        )
        self._has_narrow_queries = rank is not None
        if rank is None:
            self.q_proj = ColumnLinear(hidden, [heads * config.widths.query], ranks)
            return
        self.q_a_proj = Linear(hidden, rank, bias=config.attention_bias)
        self.q_a_layernorm = RMSNorm(rank, NARROW_EPS)
        self.q_b_proj = ColumnLinear(rank, [heads * config.widths.query], ranks)

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Attend from (tokens, hidden)."""
        if self._has_narrow_queries:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        return self.attend(query, x, batch, turn)


class Router(nn.Module):
    """Scores experts, and looks for the best in the best groups alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.n_routed_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False
        )
        self._config = config

    def forward(self, x: torch.Tensor) -> Choice:
        """Choose experts for (tokens, hidden), in float32."""
        config = self._config
        scores = linear(x.float(), self.weight.float()).sigmoid()
        weights, indices = choose_experts(
            scores,
            config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            ranking=self._in_best_groups(scores + self.e_score_correction_bias),
        )
        return Choice(weights * config.routed_scaling_factor, indices)

    def _in_best_groups(self, ranking: torch.Tensor) -> torch.Tensor:
        """Rule out experts of all but the best groups; a group counts by its two best."""
        grouped: torch.Tensor = ranking.unflatten(-1, (self._config.n_group, -1))
        group_ranking = grouped.topk(2, -1).values.sum(-1)
        best = group_ranking.topk(self._config.topk_group, -1).indices
        is_out = torch.ones_like(group_ranking, dtype=torch.bool).scatter(-1, best, value=False)
        return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(-2)


class SparseMLP(nn.Module):
    """The chosen experts, and one that every token goes through."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = Experts(config.n_routed_experts, hidden, width, ranks)
        self.shared_experts = GatedMLP(hidden, width * config.n_shared_experts, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, equal on every rank."""
        out: torch.Tensor = self.experts(x, *self.gate(x)) + self.shared_experts(x)
        return out


class Layer(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm."""

    def __init__(self, config: Config, index: int, scale: float, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, scale, ranks)
        self.mlp = (
            GatedMLP(hidden, config.intermediate_size, ranks)
            if index < config.first_k_dense_replace
            else SparseMLP(config, ranks)
        )
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: torch.Tensor, batch: StepBatch, turn: Turn) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), batch, turn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DeepseekDecoder(Decoder):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        rope = rope_settings(raw)
        scale = attention_scale(config, rope)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.qk_rope_head_dim, rope)
        self._has_neighbour_pairs = config.rope_interleave
        self.layers = nn.ModuleList(
            Layer(config, index, scale, ranks) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids)
        turn = partial(self._turn, self.rotary.angles(batch.positions))
        for layer in self.layers:
            x = layer(x, batch, turn)
        out: torch.Tensor = self.norm(x)
        return out

    def _turn(self, angles: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Turn (tokens, heads, width); pairs that are neighbours come out half a width apart."""
        if self._has_neighbour_pairs:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned: torch.Tensor = self.rotary(x, angles)
        return turned


class Model(CausalLM):
    """A DeepSeek V3 with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__(DeepseekDecoder(config, raw, ranks), is_tied=config.tie_word_embeddings)
