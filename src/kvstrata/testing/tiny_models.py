"""Tiny checkpoints with the answers of `transformers`, and engines that must end as they began."""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.core.spans import floor_to
from kvstrata.engine import ConnectorParts, Engine, EngineOptions
from kvstrata.engine.reference import Reference
from kvstrata.engine.tiny import make_tiny
from kvstrata.testing.memory_connector import Behaviour, MemoryScheduler, MemoryWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine import Answer, SamplingParams
    from kvstrata.engine.reference import ReferenceAnswer

PROMPT_TOKENS = (254, 1, 30, 62, 94)
ANSWER_TOKENS = 6
"""So that answers cross the end of a block, whatever its size."""
_SMALL = EngineOptions(cache_capacity="8MiB")
_TOLERANCE = 1e-4
_CROWD = 6


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One tiny checkpoint, some prompts, and what `transformers` answers to them."""

    folder: Path
    reference: Reference
    prompts: list[list[int]]
    expected: list[ReferenceAnswer]

    @classmethod
    def make(cls, arch: str, folder: Path) -> TinyModel:
        """Write a checkpoint and ask `transformers`."""
        make_tiny(arch, folder)
        reference = Reference(folder)
        prompts = [_random_tokens(count) for count in PROMPT_TOKENS]
        expected = [reference.answer(prompt, ANSWER_TOKENS) for prompt in prompts]
        return cls(folder, reference, prompts, expected)

    @contextmanager
    def engine(
        self,
        connector: ConnectorParts | None = None,
        **options: Any,  # noqa: ANN401 - those of EngineOptions
    ) -> Iterator[Engine]:
        """An engine that must be whole and empty in the end."""
        with Engine(self.folder, replace(_SMALL, **options), connector) as engine:
            yield engine
            engine.run_until_idle(10_000)
            engine.scheduler.check_invariants()
            pool = engine.scheduler.blocks.pool
            assert pool.num_free == pool.num_blocks - 1, "blocks are still held"

    def hits(self, layout: KVLayout) -> list[int]:
        """The tokens of each prompt that a full cache has: whole blocks of every group."""
        stride = math.lcm(*(group.block_tokens for group in layout.groups))
        return [floor_to(len(prompt) - 1, stride) for prompt in self.prompts]

    def blocks_needed(self, num_tokens: int) -> int:
        """The smallest pool that one request of so many tokens can run in."""
        with self.engine() as engine:
            return engine.scheduler.blocks.most_needed(num_tokens) + 1

    def check(
        self, answers: Sequence[Answer], expected: Sequence[ReferenceAnswer] | None = None
    ) -> None:
        """The tokens are those of `transformers`; scores, where kept, are as good as equal."""
        for answer, wanted in zip(answers, expected or self.expected, strict=True):
            assert answer.tokens == wanted.tokens, answer.request_id
            if answer.logits:
                found, scores = torch.tensor(answer.logits), torch.tensor(wanted.logits)
                torch.testing.assert_close(found, scores, atol=_TOLERANCE, rtol=_TOLERANCE)

    def without_longest(self) -> TinyModel:
        """The same without the first prompt, for engines with few blocks."""
        return replace(self, prompts=self.prompts[1:], expected=self.expected[1:])

    def answer_crowded(self, engine: Engine, sampling: SamplingParams) -> list[Answer]:
        """Answer every prompt several times at once, none sharing blocks with another; check all.

        In an engine with few blocks requests must lose theirs.
        """
        requests = [
            engine.add_request(prompt, sampling, cache_salt=str(salt))
            for salt, prompt in itertools.product(range(_CROWD), self.prompts)
        ]
        engine.run_until_idle(10_000)
        answers = [engine.answer(request) for request in requests]
        self.check(answers, self.expected * _CROWD)
        assert sum(answer.num_preemptions for answer in answers) > 0, "nobody was robbed"
        return answers


class Memory:
    """A connector in memory whose scheduler half can be looked at.

    Args:
        behaviour: may be changed at any time.
    """

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.parts = ConnectorParts(self._make, MemoryWorker)
        self._half: MemoryScheduler | None = None

    @property
    def num_loaded_blocks(self) -> int:
        """Blocks that were loaded without a fault."""
        return self._half.num_loaded_blocks if self._half else 0

    def _make(self, layout: KVLayout) -> MemoryScheduler:
        self._half = MemoryScheduler(layout, self.behaviour)
        return self._half


def _random_tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    tokens: list[int] = torch.randint(0, 256, (count,), generator=generator).tolist()
    return tokens
