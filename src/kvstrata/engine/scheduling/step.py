"""What the scheduler asks of every rank in one step, and what it gets back.

Ranks keep no state of requests: a step names all that is needed, so any rank can fail, be asked
again or be replaced without a word about the past.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answers are drawn.

    Args:
        max_tokens: an answer ends after this many.
        temperature: 0 takes the likeliest token.
        seed: equal seeds draw equal answers.
        stop_tokens: an answer ends with any of these.
        keep_logits: whether to hand out the scores behind each token.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    keep_logits: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One request's part of a step."""

    request_id: str
    start: int
    """Tokens whose cache entries are there."""
    token_ids: Sequence[int]
    """The tokens to compute, from `start` on."""
    tables: tuple[Sequence[int], ...]
    """The request's blocks, by group."""
    sampling: SamplingParams | None
    """How to draw the next token; None: the prompt goes on."""

    @property
    def stop(self) -> int:
        """One past the last token to compute."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, for every rank."""

    sequences: Sequence[ScheduledSequence]
    connector_message: bytes | None = None
    """From the connector's scheduler half to its worker halves."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank made of a step."""

    tokens: dict[str, int] = field(default_factory=dict)
    """The next token of each sequence that had one drawn."""
    logits: dict[str, list[float]] = field(default_factory=dict)
    """Where they were asked for."""
    connector_report: bytes | None = None
    """From the connector's worker half to its scheduler half."""
