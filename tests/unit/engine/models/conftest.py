"""Models are compared with `transformers` on the same random checkpoint, in float32."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstrata.core.spans import ceil_div
from kvstrata.engine.ranks import LocalRank, RankProcesses, RankSettings
from kvstrata.engine.scheduling.step import SamplingParams, ScheduledSequence, StepPlan
from kvstrata.engine.tiny import make_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstrata.engine.ranks import Ranks

NUM_BLOCKS = 400
MOST_TOKENS = 256
KEEP = SamplingParams(keep_logits=True)


class Parity:
    """One tiny checkpoint, in `transformers` and here."""

    def __init__(self, arch: str, folder: Path, **changes: Any) -> None:  # noqa: ANN401
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

        self.folder = folder / arch
        make_tiny(arch, self.folder, **changes)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, output_loading_info=True
        )
        self.reference, info = loaded
        assert not info["missing_keys"], info
        assert not info["unexpected_keys"], info
        self.reference.eval()
        self.vocab_size = int(self.reference.config.vocab_size)

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocab_size, (num_tokens,), generator=generator).tolist()

    def expected(self, prompt: Sequence[int]) -> torch.Tensor:
        """The scores behind every token, by `transformers`."""
        with torch.no_grad():
            logits: torch.Tensor = self.reference(torch.tensor([list(prompt)])).logits[0]
        return logits

    @contextmanager
    def ranks(self, num_ranks: int = 1) -> Iterator[Ranks]:
        settings = RankSettings(folder=self.folder)
        ranks: Ranks = LocalRank(settings) if num_ranks == 1 else RankProcesses(settings, num_ranks)
        try:
            ranks.allocate(NUM_BLOCKS)
            yield ranks
        finally:
            ranks.close()

    def check(self, ranks: Ranks, prompts: Sequence[Sequence[int]], cuts: Sequence[int]) -> None:
        """Compute prompts side by side, cut at these lengths; compare the scores at each cut."""
        expected = [self.expected(prompt) for prompt in prompts]
        tables = _tables(ranks, len(prompts))
        start = 0
        for stop in cuts:
            sequences = [
                ScheduledSequence(
                    str(i),
                    min(start, len(p) - 1),
                    p[min(start, len(p) - 1) : stop],
                    tables[i],
                    KEEP,
                )
                for i, p in enumerate(prompts)
                if start < len(p)
            ]
            results = ranks.execute(StepPlan(sequences))
            for sequence in sequences:
                index = int(sequence.request_id)
                for result in results:
                    found = torch.tensor(result.logits[sequence.request_id])
                    wanted = expected[index][sequence.stop - 1]
                    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
                    assert result.tokens[sequence.request_id] == int(wanted.argmax())
            start = stop


def _tables(ranks: Ranks, count: int) -> list[tuple[list[int], ...]]:
    """Blocks for sequences side by side, in no helpful order."""
    ids = iter(reversed(range(1, NUM_BLOCKS)))
    return [
        tuple(
            [next(ids) for _ in range(ceil_div(MOST_TOKENS, group.block_tokens))]
            for group in ranks.plan.layout.groups
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def make_parity(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - a factory
    def make(arch: str, **changes: Any) -> Parity:  # noqa: ANN401
        return Parity(arch, tmp_path_factory.mktemp(arch), **changes)

    return make
