"""What the showcase tells whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvstrata.core.layout import GroupKind


@dataclass(frozen=True, slots=True)
class Row:
    """One model restored from one tier."""

    model: str
    tier: str
    restored_tokens: int
    """Of the prompt, loaded from this tier."""
    restored_bytes: int
    """Copied to the device."""
    recompute_s: float
    """Until the first token, without any cache."""
    restore_s: float
    """Until the first token, restored from this tier."""
    bytes_equal: bool
    """Whether the device memory is that of the cold run, in every block of the request."""
    logits_equal: bool
    """Whether every score is that of a run with the same hit on the device, bit by bit."""
    tokens_equal: bool
    """Whether the answer is that of an engine without offloading."""

    @property
    def is_right(self) -> bool:
        """Whether all there is to compare is equal."""
        return self.bytes_equal and self.logits_equal and self.tokens_equal


@dataclass(frozen=True, slots=True)
class Phase:
    """What is done next."""

    model: str
    text: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A model's cost without any cache is known."""

    model: str
    kinds: tuple[GroupKind, ...]
    """Of its groups."""
    seconds: float


class Mark(Enum):
    """What became of one chunk of the prompt."""

    LOADED = "loaded"
    STORED = "stored, not needed"
    REMOVED = "removed"
    ABSENT = "never stored"


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """The chunks of one group along the prompt."""

    kind: GroupKind
    chunk_tokens: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A hit that one lost chunk made shorter."""

    model: str
    removed: str
    """The lost chunk, in words."""
    num_tokens: int
    """Of the prompt."""
    restored_tokens: int
    explanation: str
    """The planner's own words."""
    tokens_equal: bool
    groups: tuple[GroupPicture, ...]


Event: TypeAlias = Phase | Recomputed | Row | PartialHit


def num_phases(num_models: int, num_places: int) -> int:
    """How many phases a whole show has."""
    return num_models * (2 + num_places) + 1
