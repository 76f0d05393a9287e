"""Qwen3-Next: gated delta nets with full attention in between, and mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import torch
from torch import nn
from torch.nn.functional import silu, softplus

from kvstrata.engine.cache.specs import AttentionSpec, StatePart, StateSpec
from kvstrata.engine.models.settings import accept
from kvstrata.engine.nn.basic import GatedMLP, RMSNorm
from kvstrata.engine.nn.cached import PagedAttention, StateCache
from kvstrata.engine.nn.causal import CausalLM, Decoder
from kvstrata.engine.nn.experts import Experts, choose_experts
from kvstrata.engine.nn.gated_delta import DeltaInputs, gated_delta
from kvstrata.engine.nn.parallel import ColumnLinear, Cut, Embedding, Linear, RowLinear, Sharded
from kvstrata.engine.nn.rotary import Rotary, rope_settings
from kvstrata.engine.nn.short_conv import ShortConv
from kvstrata.engine.tiny import draw_weight
from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.nn.step import Run, StateRun, StepBatch

_Count = Annotated[int, msgspec.Meta(ge=1)]
_LAYER_KINDS: Final = ("linear_attention", "full_attention")

TINY: Final[dict[str, Any]] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "hidden_act": "silu",
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json."""

    hidden_size: int = 2048
    hidden_act: str = "silu"
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: _Count = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: _Count = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    layer_types: list[str] | None = None
    full_attention_interval: _Count = 4
    vocab_size: int = 151_936
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def layer_kind(self, index: int) -> str:
        """How a layer looks back."""
        if self.layer_types is not None:
            return self.layer_types[index]
        is_full = (index + 1) % self.full_attention_interval == 0
        return "full_attention" if is_full else "linear_attention"

    def has_experts(self, index: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        if self.num_experts == 0 or index in (self.mlp_only_layers or ()):
            return False
        return (index + 1) % self.decoder_sparse_step == 0

    def check(self) -> None:
        """See that the settings are supported and fit together.

        Raises:
            ModelError: names the key and what is accepted.
        """
        accept("hidden_act", self.hidden_act, ["silu"])
        kinds, layers = self.layer_types, self.num_hidden_layers
        if kinds is not None and (len(kinds) != layers or {*kinds} - {*_LAYER_KINDS}):
            raise ModelError(
                f"config.json: layer_types is {kinds}; accepted: {' or '.join(_LAYER_KINDS)}, "
                f"num_hidden_layers ({layers}) times"
            )
        key_heads, value_heads = self.linear_num_key_heads, self.linear_num_value_heads
        if value_heads % key_heads:
            raise ModelError(
                f"config.json: linear_num_value_heads is {value_heads}; accepted: a multiple of "
                f"linear_num_key_heads, {key_heads}"
            )


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a weight so that states fade over some hundred tokens; most norms lie around zero."""
    drawn = draw_weight(name, shape, generator)
    match name.split(".")[-2:]:
        case [_, "A_log"]:
            return (drawn - 1.0) * 10.0 - 1.0
        case [_, "dt_bias"]:
            return drawn * 10.0 - 3.0
        case ["norm", "weight"] if ".linear_attn." in name:
            return drawn
        case [owner, "weight"] if owner.endswith("norm"):
            return drawn - 1.0
    return drawn


class Attention(nn.Module):
    """Grouped-query attention with norms on the heads and a gate on what they find."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        width, hidden, bias = config.head_dim, config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        ranks.share(heads, "num_attention_heads")
        local_kv_heads = ranks.share(kv_heads, "num_key_value_heads")
        self._head_width = width
        self.q_proj = ColumnLinear(hidden, [heads * width * 2], ranks, bias=bias)
        self.k_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.v_proj = ColumnLinear(hidden, [kv_heads * width], ranks, bias=bias)
        self.o_proj = RowLinear(heads * width, hidden, ranks, bias=bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(width, config.rms_norm_eps, offset=1.0)
        self.attention = PagedAttention(AttentionSpec(local_kv_heads, width), scale=width**-0.5)

    def forward(
        self, x: torch.Tensor, batch: StepBatch, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Attend from (tokens, hidden); `turn` puts positions into queries and keys."""
        width = self._head_width
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * width)).chunk(2, -1)
        key, value = (
            projection(x).unflatten(-1, (-1, width)) for projection in (self.k_proj, self.v_proj)
        )
        query, key = turn(self.q_norm(query)), turn(self.k_norm(key))
        attended = self.attention(query, key, value, batch) * gate.sigmoid()
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class GatedDeltaNet(Sharded):
    """Short convolution, gated delta rule, gated norm. Key heads are split over the ranks."""

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, value_heads = config.hidden_size, config.linear_num_value_heads
        self._key_width = config.linear_key_head_dim
        self._value_width = config.linear_value_head_dim
        self._num_key_heads = ranks.share(config.linear_num_key_heads, "linear_num_key_heads")
        self._num_value_heads = ranks.share(value_heads, "linear_num_value_heads")
        keys = config.linear_num_key_heads * self._key_width
        values = value_heads * self._value_width
        # Rows of both input projections are ordered by key head, so each rank's lie together.
        self.in_proj_qkvz = ColumnLinear(hidden, [2 * keys + 2 * values], ranks)
        self.in_proj_ba = ColumnLinear(hidden, [2 * value_heads], ranks)
        self.conv1d = ShortConv(
            [keys, keys, values], config.linear_conv_kernel_dim, ranks, activation=silu
        )
        for name in ("A_log", "dt_bias"):
            self.add_part(name, (value_heads,), Cut(0, (value_heads,)), ranks)
        self.norm = RMSNorm(self._value_width, config.rms_norm_eps)
        self.out_proj = RowLinear(values, hidden, ranks)
        self.states = StateCache(self._state_spec())

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Read and write the memory from (tokens, hidden)."""
        mixed, gate = self._mixed_and_gate(x)
        beta, log_decay = self._beta_and_log_decay(x)
        outputs = [
            self._advance(run, states, mixed[run.tokens], beta[run.tokens], log_decay[run.tokens])
            for run, states in zip(batch.runs, self.states.runs(batch), strict=True)
        ]
        gated = (self.norm(torch.cat(outputs)) * silu(gate.float())).to(x.dtype)
        out: torch.Tensor = self.out_proj(gated.flatten(1))
        return out

    def _state_spec(self) -> StateSpec:
        """The memory of each value head, then the convolution's last inputs."""
        memory = (self._num_value_heads, self._key_width, self._value_width)
        return StateSpec(
            (
                StatePart(memory, torch.float32),
                StatePart(self.conv1d.state_shape, self.conv1d.weight.dtype),
            )
        )

    def _mixed_and_gate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values as the convolution's channels; the gate as heads."""
        by_key_head = self.in_proj_qkvz(x).unflatten(-1, (self._num_key_heads, -1))
        values = self._num_value_heads // self._num_key_heads * self._value_width
        sizes = [self._key_width, self._key_width, values, values]
        *mixed, gate = (part.flatten(1) for part in by_key_head.split(sizes, -1))
        return torch.cat(mixed, -1), gate.unflatten(-1, (-1, self._value_width))

    def _beta_and_log_decay(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much each token writes, and how much it forgets: (tokens, value heads) each."""
        by_key_head = self.in_proj_ba(x).unflatten(-1, (self._num_key_heads, -1))
        beta, step = (part.flatten(1) for part in by_key_head.chunk(2, -1))
        return beta.sigmoid(), -self.A_log.float().exp() * softplus(step.float() + self.dt_bias)

    def _advance(
        self,
        run: Run,
        states: StateRun,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        log_decay: torch.Tensor,
    ) -> torch.Tensor:
        """Take a run's tokens into its states: (tokens, value heads, value width)."""
        mixed, beta, log_decay = (
            part.unflatten(0, (run.num_sequences, run.num_tokens))
            for part in (mixed, beta, log_decay)
        )
        memory, last_inputs = self.states.load(states)
        mixed, last_inputs = self.conv1d(mixed, last_inputs)
        query, key, value = self._heads(mixed)
        inputs = DeltaInputs(query, key, value, log_decay, beta)
        output, memory = gated_delta(inputs, memory)
        self.states.keep(states, [memory, last_inputs])
        return output.flatten(0, 1)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values out of the convolution's channels."""
        keys = self._num_key_heads * self._key_width
        query, key, value = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
        by_head = (-1, self._key_width)
        return (
            query.unflatten(-1, by_head),
            key.unflatten(-1, by_head),
            value.unflatten(-1, (-1, self._value_width)),
        )


class SparseMLP(nn.Module):
    """The experts each token chooses, and one that all tokens share, behind a gate."""

    def __init__(self, config: Config, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self._num_chosen = config.num_experts_per_tok
        self._normalise = config.norm_topk_prob
        self.gate = Linear(hidden, count)
        self.experts = Experts(count, hidden, config.moe_intermediate_size, ranks)
        self.shared_expert = GatedMLP(hidden, config.shared_expert_intermediate_size, ranks)
        self.shared_expert_gate = Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, equal on every rank."""
        scores = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, indices = choose_experts(scores, self._num_chosen, normalise=self._normalise)
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        out: torch.Tensor = self.experts(x, weights.to(x.dtype), indices) + shared
        return out


class Layer(nn.Module):
    """Attention or a gated delta net, then a feed-forward part, each behind a norm."""

    def __init__(self, config: Config, index: int, ranks: TensorParallel) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        is_full = config.layer_kind(index) == "full_attention"
        self.self_attn = Attention(config, ranks) if is_full else None
        self.linear_attn = None if is_full else GatedDeltaNet(config, ranks)
        self.mlp = (
            SparseMLP(config, ranks)
            if config.has_experts(index)
            else GatedMLP(hidden, config.intermediate_size, ranks)
        )
        self.input_layernorm = RMSNorm(hidden, eps, offset=1.0)
        self.post_attention_layernorm = RMSNorm(hidden, eps, offset=1.0)

    def forward(
        self, x: torch.Tensor, batch: StepBatch, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Add both to (tokens, hidden)."""
        x = x + self._mix(self.input_layernorm(x), batch, turn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _mix(
        self, x: torch.Tensor, batch: StepBatch, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if self.self_attn is not None:
            attended: torch.Tensor = self.self_attn(x, batch, turn)
            return attended
        assert self.linear_attn is not None
        recalled: torch.Tensor = self.linear_attn(x, batch)
        return recalled


class Qwen3NextDecoder(Decoder):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, rope_settings(raw, partial_rotary_factor=0.25))
        self.layers = nn.ModuleList(
            Layer(config, index, ranks) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """The last hidden states of the new tokens."""
        x = self.embed_tokens(batch.token_ids)
        turn = partial(self.rotary, angles=self.rotary.angles(batch.positions))
        for layer in self.layers:
            x = layer(x, batch, turn)
        out: torch.Tensor = self.norm(x)
        return out


class Model(CausalLM):
    """A Qwen3-Next with its head.

    Args:
        config: what was read of config.json.
        raw: config.json itself, for what has more than one spelling.
        ranks: who shares the weights.

    Raises:
        ModelError: a setting is not supported.
    """

    def __init__(self, config: Config, raw: Mapping[str, Any], ranks: TensorParallel) -> None:
        config.check()
        super().__init__(Qwen3NextDecoder(config, raw, ranks), is_tied=config.tie_word_embeddings)
