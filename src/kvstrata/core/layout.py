"""The shape of a model's KV cache: groups of layers, and how each group is paged.

These values come from an engine once, at start. Everything about chunks, hits and bytes follows
from them, so geometry that makes no sense is refused here, with the values named.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property

from kvstrata.errors import LayoutError


class GroupKind(StrEnum):
    """What a layer needs from the past to go on at token N."""

    FULL = "full"
    """All blocks in [0, N)."""
    WINDOW = "window"
    """The blocks that touch [N - window_tokens + 1, N)."""
    RECURRENT = "recurrent"
    """One state, taken at exactly N."""


class Sharding(StrEnum):
    """How a group's bytes relate between the ranks of one tensor-parallel engine."""

    SHARDED = "sharded"
    """Every rank holds its own part."""
    REPLICATED = "replicated"
    """Every rank holds the same bytes (MLA)."""


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's share of a group."""

    name: str
    page_bytes: int
    """Real bytes of one block of this layer on one rank, padding not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table and one kind.

    Raises:
        LayoutError: the numbers contradict each other.
    """

    kind: GroupKind
    block_tokens: int
    """Tokens that one block of the engine stands for."""
    layers: tuple[KVLayer, ...]
    kernel_block_tokens: int | None = None
    """Tokens of the smaller blocks that attention kernels see; None: the same blocks."""
    window_tokens: int | None = None
    """WINDOW only: how far back a token looks, itself included."""
    state_tokens: int | None = None
    """RECURRENT only: a state may exist at multiples of this; None: at ends of blocks alone."""
    sharding: Sharding = Sharding.SHARDED
    is_draft: bool = False
    """Whether these layers belong to an EAGLE or MTP draft head."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_kind()

    @property
    def block_bytes(self) -> int:
        """Real bytes of one block over all layers, on one rank."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def cut_tokens(self) -> int:
        """The smallest run of tokens whose bytes can be copied apart from their block's rest."""
        return self.kernel_block_tokens or self.block_tokens

    @property
    def rows_per_block(self) -> int:
        """Kernel blocks in one block."""
        return self.block_tokens // self.cut_tokens

    @property
    def boundary_tokens(self) -> int:
        """RECURRENT: the distance between two lengths at which a state may exist."""
        return self.state_tokens or self.block_tokens

    def _check_sizes(self) -> None:
        for name in ("block_tokens", "kernel_block_tokens", "window_tokens", "state_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"{self.kind} group: {name} is {value}, but must be at least 1")
        for name in ("kernel_block_tokens", "state_tokens"):
            part = getattr(self, name)
            if part is not None and self.block_tokens % part:
                raise LayoutError(
                    f"{self.kind} group: {name} {part} does not divide "
                    f"block_tokens {self.block_tokens}"
                )

    def _check_layers(self) -> None:
        if not self.layers:
            raise LayoutError(f"{self.kind} group: it has no layers")
        for layer in self.layers:
            if layer.page_bytes < 1 or layer.page_bytes % self.rows_per_block:
                raise LayoutError(
                    f"{self.kind} group: page_bytes of layer {layer.name!r} is {layer.page_bytes}, "
                    f"but must be a positive multiple of {self.rows_per_block}, its number of "
                    f"kernel blocks"
                )

    def _check_kind(self) -> None:
        is_window = self.kind is GroupKind.WINDOW
        is_recurrent = self.kind is GroupKind.RECURRENT
        if is_window and self.window_tokens is None:
            raise LayoutError("window group: window_tokens is missing")
        if not is_window and self.window_tokens is not None:
            raise LayoutError(
                f"{self.kind} group: window_tokens is {self.window_tokens}, "
                f"but only window groups have one"
            )
        if not is_recurrent and self.state_tokens is not None:
            raise LayoutError(
                f"{self.kind} group: state_tokens is {self.state_tokens}, "
                f"but only recurrent groups have one"
            )
        if is_recurrent and self.kernel_block_tokens is not None:
            raise LayoutError(
                f"recurrent group: kernel_block_tokens is {self.kernel_block_tokens}, "
                f"but a state is one piece"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How many ranks share one model, and along which axes."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise LayoutError(f"parallel layout: {axis} is {size}, but must be at least 1")

    @property
    def num_ranks(self) -> int:
        """Ranks that each hold a part of every chunk."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """All KV groups of one model on one engine.

    Raises:
        LayoutError: the groups contradict each other or the hash block.
    """

    groups: tuple[KVGroup, ...]
    hash_block_tokens: int
    """Tokens per prefix hash; divides every block size."""
    dtype: str
    """Of the attention caches, as the engine names it."""
    parallel: ParallelLayout = ParallelLayout()
    hit_alignment_tokens: int | None = None
    """The engine accepts hits only at multiples of this; None: at every hash block."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("layout: it has no groups")
        if self.hash_block_tokens < 1:
            raise LayoutError(
                f"layout: hash_block_tokens is {self.hash_block_tokens}, but must be at least 1"
            )
        self._check_names()
        self._check_hash_block()

    @property
    def alignment_tokens(self) -> int:
        """Hits end at multiples of this."""
        if self.hit_alignment_tokens is None:
            return self.hash_block_tokens
        return self.hit_alignment_tokens

    @cached_property
    def hit_stride_tokens(self) -> int:
        """Every usable length is a multiple of this: all recurrent boundaries and the alignment.

        A fact about the model, not a requirement on blocks or chunks: attention groups add
        nothing to it, whatever their sizes.
        """
        states = (g.boundary_tokens for g in self.groups if g.kind is GroupKind.RECURRENT)
        return math.lcm(self.alignment_tokens, *states)

    @cached_property
    def fingerprint(self) -> str:
        """A stable name for the bytes and keys this layout leads to.

        Equal on every machine and in every process for equal layouts. The hit alignment is left
        out: it decides which hits are taken, not what a chunk holds.
        """
        facts = asdict(self)
        del facts["hit_alignment_tokens"]
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvstrata/layout/1:" + text.encode()).hexdigest()

    def _check_names(self) -> None:
        names = [layer.name for group in self.groups for layer in group.layers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise LayoutError(f"layout: layers stand in more than one group: {repeated}")

    def _check_hash_block(self) -> None:
        for index, group in enumerate(self.groups):
            for name, size in (
                ("block_tokens", group.block_tokens),
                ("state_tokens", group.boundary_tokens),
            ):
                if size % self.hash_block_tokens:
                    raise LayoutError(
                        f"layout: hash_block_tokens {self.hash_block_tokens} does not divide "
                        f"{name} {size} of {group.kind} group {index}; "
                        f"{self.largest_hash_block(self.groups)} would divide all"
                    )
        if self.alignment_tokens < 1 or self.alignment_tokens % self.hash_block_tokens:
            raise LayoutError(
                f"layout: hit_alignment_tokens {self.alignment_tokens} is not a multiple of "
                f"hash_block_tokens {self.hash_block_tokens}"
            )

    @staticmethod
    def largest_hash_block(groups: tuple[KVGroup, ...]) -> int:
        """The largest hash block that divides every group's blocks and states."""
        return math.gcd(*(group.boundary_tokens for group in groups))
