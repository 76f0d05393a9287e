"""What a user may choose about the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstrata.config.units import ACCEPTED_SIZES, ByteSize
from kvstrata.errors import ConfigError

_COUNTS: Final = ("num_ranks", "kernel_block_tokens", "max_step_tokens", "max_running")
_OPTIONAL_COUNTS: Final = ("state_tokens", "max_request_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may choose.

    Args:
        dtype: of weights and caches: "float32", "bfloat16", or "auto" for the checkpoint's own.
        device: "cpu", "cuda" or "cuda:1".
        num_ranks: tensor parallelism; more than one runs each rank in a process of its own.
        cache_capacity: memory for KV blocks, per rank.
        num_blocks: number of KV blocks, the null block included; instead of the capacity.
        kernel_block_tokens: tokens per kernel block.
        state_tokens: recurrent states may be kept at multiples of this.
        max_step_tokens: tokens computed in one step.
        max_running: requests that hold blocks at the same time.
        max_request_tokens: prompt and answer of one request; None: what the model allows.

    Raises:
        ConfigError: a value makes no sense.
    """

    dtype: str = "auto"
    device: str = "cpu"
    num_ranks: int = 1
    cache_capacity: str = "256MiB"
    num_blocks: int | None = None
    kernel_block_tokens: int = 16
    state_tokens: int | None = None
    max_step_tokens: int = 512
    max_running: int = 64
    max_request_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_at_least(1, name, getattr(self, name))
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_at_least(1, name, getattr(self, name))
        if self.num_blocks is not None:
            _check_at_least(2, "num_blocks", self.num_blocks)
        _ = self.capacity_bytes  # refuses what is no size

    @property
    def capacity_bytes(self) -> int:
        """The capacity as a number."""
        try:
            return int(ByteSize.parse(self.cache_capacity))
        except ValueError as error:
            problem = str(error).partition("; accepted:")[0]
            raise ConfigError("cache_capacity", problem, ACCEPTED_SIZES) from error


def _check_at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ConfigError(name, f"it is {value}", f"at least {least}")
