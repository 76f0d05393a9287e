"""Models, how little of everything they are given, and how they are talked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_TOKENS = 1024
LOAD_DEADLINE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Form:
    """One server, and the users that it has."""

    model: str
    num_blocks: int
    """So few that requests are robbed of them if many talk at once."""
    host: str
    quota_bytes: int
    tolerance: float
    """Between any two scores of the same token; most must be within a tenth of it."""
    step_tokens: int = 256
    """So few that prompts are computed in several steps."""
    is_crowded: bool = True
    """Whether users talk at once, and not one question after another."""
    are_answers_quoted: bool = True
    """Whether a question begins with the answers before it, and not with the questions alone."""
    max_answer: int = 60
    options: tuple[str, ...] = ()
    """Of the reference too."""

    def limits(self) -> list[str]:
        """What only the server under attack has to bear, if steps do not matter."""
        blocks = ["--num-gpu-blocks-override", str(self.num_blocks)]
        return [*blocks, *self.steps(), "--max-model-len", str(MAX_TOKENS)]

    def steps(self) -> list[str]:
        """How prompts are cut."""
        return ["--max-num-batched-tokens", str(self.step_tokens)]

    def settings(self, store: Path, seed: int) -> dict[str, object]:
        """The connector's: a tier that fails, hangs and damages what it holds."""
        options = {
            "path": str(store),
            "quota": self.quota_bytes,
            "fault_share": 0.05,
            "hang_s": 1.5 * LOAD_DEADLINE_S,
            "seed": seed,
        }
        tier = {
            "kind": "custom",
            "name": "faulty",
            "store": "kvstrata.testing.faulty_store:FaultyStore",
            "options": options,
        }
        return {
            "host": {"capacity": self.host},
            "tiers": [tier],
            "load": {"deadline": f"{LOAD_DEADLINE_S}s", "decide": "always"},
        }


_EVERY_BLOCK = ("--prefix-cache-retention-interval", "128")
"""Keep states at every block, not at the last one of a prompt only."""
FORMS = {
    "gemma3": Form(
        model="gemma3",
        num_blocks=80,
        host="6MiB",
        quota_bytes=24 << 20,
        tolerance=1e-3,
        options=("--block-size", "32"),
    ),
    # It has to be bfloat16, where steps and batches show: without a connector a server with as few
    # blocks is as far off as 0.35. This form sees whether all go on; the next, whether it is right.
    "qwen3_next": Form(
        model="qwen3_next_small",
        num_blocks=26,
        host="12MiB",
        quota_bytes=64 << 20,
        tolerance=1.0,
        options=_EVERY_BLOCK,
    ),
    # A step is a block, and nobody shares one: a prompt is cut at the same places whatever part of
    # it was restored, and every state was computed in such steps. Not a bit may differ. What an
    # answer's own steps have computed is another matter, so that no question begins with one.
    "qwen3_next_exact": Form(
        model="qwen3_next_small",
        num_blocks=20,
        host="6MiB",
        quota_bytes=48 << 20,
        tolerance=0.0,
        step_tokens=128,
        is_crowded=False,
        are_answers_quoted=False,
        max_answer=16,
        options=_EVERY_BLOCK,
    ),
}
