"""`transformers` on the same model directory: what the engine is tested and measured against.

It is no dependency of the engine: only who compares needs it.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone: what is compared then depends on no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The likeliest tokens, and the scores behind each."""

    tokens: list[int]
    logits: list[list[float]]


class Reference:
    """A model directory as `transformers` runs it, in float32 on the CPU.

    Args:
        folder: config.json and safetensors.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: it finds other weights in the directory than it wants.
    """

    def __init__(self, folder: Path) -> None:
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if found["missing_keys"] or found["unexpected_keys"]:
            raise ValueError(f"transformers reads {folder} otherwise: {found}")
        self._model.eval()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> int:
        """Fill a new cache with a prompt; the likeliest next token."""
        output = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The scores behind every token: (tokens, vocabulary)."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    def answer(self, prompt: Sequence[int], num_tokens: int) -> ReferenceAnswer:
        """Go on with the likeliest tokens; everything is computed anew for each, without a cache.

        `generate` of transformers is not asked: it guesses padding and masks from the tokens.
        """
        tokens, scores = list(prompt), []
        for _ in range(num_tokens):
            row = self.logits(tokens)[-1]
            tokens.append(int(row.argmax()))
            scores.append(row.tolist())
        return ReferenceAnswer(tokens[len(prompt) :], scores)
