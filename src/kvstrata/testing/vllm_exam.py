"""The same prompts for several vLLM servers, and what they must answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstrata.testing.vllm_endpoint import VllmEndpoint

_NUM_TOKENS: Final = 12
"""Of each answer."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Prompts, and what vLLM answers to them without a connector."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, plain: VllmEndpoint, prompts: list[list[int]]) -> Exam:
        """Find out what a server without a connector answers."""
        answers = [plain.ask(prompt, _NUM_TOKENS).tokens for prompt in prompts]
        assert len(set(map(tuple, answers))) == len(answers), "prompts do not matter"
        return cls(prompts, answers)

    def take(self, server: VllmEndpoint, *numbers: int) -> list[int]:
        """Ask a server some of them, one by one; the tokens of each that were not computed."""
        completions = [server.ask(self.prompts[n], _NUM_TOKENS) for n in numbers]
        assert [c.tokens for c in completions] == [self.answers[n] for n in numbers]
        return [c.cached_tokens for c in completions]
