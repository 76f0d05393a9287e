"""What `kvstrata engine run` shows: answers as they grow, then figures; or one object."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from kvstrata.engine import Answer, NewToken
    from kvstrata.engine.scheduling.request import Request

_FRAMES_PER_S: Final = 15
_SHOWN_PROMPT_TOKENS: Final = 12


@dataclass
class Run:
    """Requests under way, and when their tokens came."""

    prompts: Sequence[Sequence[int]]
    requests: Sequence[Request]
    answers: Sequence[Answer] = ()
    first_token_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the start to each request's first token."""
    end_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the start to each request's last token."""
    num_steps: int = 0
    start: float = field(default_factory=time.perf_counter)

    @property
    def is_complete(self) -> bool:
        """Whether every request has ended."""
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last token."""
        return max(self.end_s.values(), default=0.0)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        """Of all answers."""
        return sum(len(request.output) for request in self.requests)

    def note(self, tokens: Iterable[NewToken]) -> None:
        """A step has ended with these tokens."""
        now = time.perf_counter() - self.start
        self.num_steps += 1
        for new in tokens:
            self.first_token_s.setdefault(new.request_id, now)
            self.end_s[new.request_id] = now


class NoAnswers:
    """Nobody is watching: answers come in the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self) -> None:
        """Show nothing."""


class LiveAnswers(NoAnswers):
    """Answers in a terminal, redrawn as they grow.

    Args:
        console: the terminal.
        run: what to show.
    """

    def __init__(self, console: Console, run: Run) -> None:
        self._run = run
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis"
        )
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self) -> None:
        """Draw, but not more often than eyes can follow."""
        now = time.perf_counter()
        if now - self._drawn >= 1 / _FRAMES_PER_S:
            self._drawn = now
            self._live.update(Group(*_lines(self._run)), refresh=True)


def _lines(run: Run) -> list[Text]:
    """One paragraph per request: prompt, answer, how it ended."""
    return [
        Text.assemble(
            (f"{index} ", "bold"),
            (_shortened(prompt), "dim"),
            (" > ", "dim"),
            (" ".join(map(str, request.output)), "green"),
            (f"  {request.finish_reason}", "cyan") if request.finish_reason else (" ...", "dim"),
        )
        for index, (prompt, request) in enumerate(zip(run.prompts, run.requests, strict=True))
    ]


def _shortened(prompt: Sequence[int]) -> str:
    shown = " ".join(map(str, prompt[-_SHOWN_PROMPT_TOKENS:]))
    hidden = len(prompt) - _SHOWN_PROMPT_TOKENS
    return f"({hidden:,} more) {shown}" if hidden > 0 else shown


def print_summary(console: Console, run: Run, start_s: float) -> None:
    """Answers and figures, for people."""
    for line in _lines(run):
        console.print(line, soft_wrap=True)
    table = Table("prompt", "tokens", "hit", "answer", "first token", "last token", box=None)
    for column in table.columns:
        column.justify = "right"
    for index, (prompt, answer) in enumerate(zip(run.prompts, run.answers, strict=True)):
        table.add_row(
            str(index),
            f"{len(prompt):,}",
            f"{answer.local_hit_tokens + answer.external_hit_tokens:,}",
            f"{len(answer.tokens):,}",
            f"{run.first_token_s[answer.request_id] * 1e3:,.1f} ms",
            f"{run.end_s[answer.request_id] * 1e3:,.1f} ms",
        )
    console.print(table)
    console.print(
        f"[dim]{run.num_prompt_tokens:,} + {run.num_new_tokens:,} tokens in {run.num_steps:,} "
        f"steps and {run.total_s:.2f} s; {run.num_new_tokens / run.total_s:,.0f} new tokens/s; "
        f"model ready after {start_s:.2f} s[/]"
    )


def run_json(run: Run, start_s: float) -> dict[str, Any]:
    """Answers and figures, for programs."""
    return {
        "answers": [
            {
                "request_id": answer.request_id,
                "num_prompt_tokens": len(prompt),
                "tokens": answer.tokens,
                "finish_reason": str(answer.finish_reason),
                "local_hit_tokens": answer.local_hit_tokens,
                "external_hit_tokens": answer.external_hit_tokens,
                "num_preemptions": answer.num_preemptions,
                "first_token_s": run.first_token_s[answer.request_id],
                "last_token_s": run.end_s[answer.request_id],
            }
            for prompt, answer in zip(run.prompts, run.answers, strict=True)
        ],
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_new_tokens": run.num_new_tokens,
        "num_steps": run.num_steps,
        "start_s": start_s,
        "total_s": run.total_s,
        "new_tokens_per_s": run.num_new_tokens / run.total_s,
    }
