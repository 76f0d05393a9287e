"""Conversations with a vLLM server whose caches are so small that everything is evicted.

Users talk in turns, about shared beginnings; some hang up. The pool of blocks is too small for
them, host memory for their chunks, and the tier below fails, hangs and damages what it holds.
Every answer must be that of a server without a connector, and nothing may be left behind.
They talk for two minutes, or for fifteen with `KVSTRATA_SOAK=full`; servers take time to start.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvstrata.testing.vllm_checkpoints import make_checkpoint
from kvstrata.testing.vllm_server import VllmServer, running

from .forms import FORMS, LOAD_DEADLINE_S, Form
from .users import User, some_tokens, talk_at_once, talk_in_turn

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.testing.vllm_endpoint import Completion
    from kvstrata.testing.vllm_metrics import Metrics

    from .users import Turn

IS_FULL = os.environ.get("KVSTRATA_SOAK") == "full"
SECONDS = (900 if IS_FULL else 120) / len(FORMS)
NUM_USERS = 8
COMPUTE_BOUND_S = 45.0
"""Far more than a crowd of users makes anyone wait on a busy machine."""


@dataclass
class Figures:
    """What one run has seen."""

    turns: int = 0
    behind_hits: int = 0
    """Turns whose prompt was not computed from its first token on."""
    sent_tokens: int = 0
    """Of questions whose answer was waited for."""
    hung_up: int = 0
    hung_up_tokens: int = 0
    rounds: int = 0
    resets: int = 0
    ties: int = 0
    """Answers that went on with another token, as likely as the reference's."""
    differences: list[float] = field(default_factory=list)
    """Between scores and the reference's."""
    longest_s: float = 0.0

    @property
    def usual_difference(self) -> float:
        """Nineteen in twenty are not larger."""
        return sorted(self.differences)[len(self.differences) * 19 // 20]


class Soak:
    """A server under attack, and the answers it must give."""

    def __init__(self, form: Form, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - not a secret
        self.figures = Figures()
        self.form = form
        model = folder / "model"
        make_checkpoint(form.model, model)
        as_well = () if form.is_crowded else form.steps()
        self.reference = VllmServer(
            model, folder / "reference.log", options=(*as_well, *form.options)
        )
        self.server = VllmServer(
            model,
            folder / "server.log",
            form.settings(folder / "store", seed),
            options=(*form.limits(), *form.options),
        )
        openings = [some_tokens(self.random, 500) for _ in range(4)]
        self.users = [User(seed * 100 + n, openings, form) for n in range(NUM_USERS)]

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(NUM_USERS if self.form.is_crowded else 1) as threads:
            while time.monotonic() < end:
                self._round(threads)
                self._reset_at_random()
        self._count_hung_up()

    def _round(self, threads: ThreadPoolExecutor) -> None:
        """Everybody talks; then the reference is asked the same, in the same way."""
        if self.form.is_crowded:
            turns = talk_at_once(self.users, self.server, threads)
        else:
            turns = talk_in_turn(self.users, self.server)
        expected = threads.map(self._expected, turns)
        for turn, true in zip(turns, expected, strict=True):
            self._check(turn, true)
        self.figures.rounds += 1

    def _expected(self, turn: Turn) -> Completion:
        return self.reference.ask(turn.prompt, len(turn.answer.tokens))

    def _check(self, turn: Turn, true: Completion) -> None:
        figures = self.figures
        figures.turns += 1
        figures.behind_hits += turn.answer.cached_tokens > 0
        figures.sent_tokens += len(turn.prompt)
        figures.longest_s = max(figures.longest_s, turn.answer.seconds)
        for place, token in enumerate(turn.answer.tokens):
            scores, true_scores = turn.answer.logprobs[place], true.logprobs[place]
            where = f"token {place} of {turn.story}, reference {true.cached_tokens} cached"
            if token != true.tokens[place]:
                gap = max(true_scores.values()) - true_scores.get(token, -100.0)
                assert gap <= self.form.tolerance, f"{where}: {scores}, not {true_scores}"
                figures.ties += 1
                return
            difference = abs(scores[token] - true_scores[token])
            assert difference <= self.form.tolerance, f"{where}: {scores}, not {true_scores}"
            figures.differences.append(difference)

    def _reset_at_random(self) -> None:
        """Between two rounds nobody may hold a block."""
        if self.random.random() < 0.3:
            self.server.settle()
            including = "external" if self.random.random() < 0.2 else "device"
            assert self.server.has_reset(including=including), "blocks are still held"
            self.figures.resets += 1

    def _count_hung_up(self) -> None:
        for user in self.users:
            self.figures.hung_up += len(user.hung_up)
            self.figures.hung_up_tokens += sum(user.hung_up)


def is_at_rest(server: VllmServer) -> bool:
    return server.is_quiet() and not server.metrics().total("vllm:kv_cache_usage_perc")


def told(figures: Figures, found: Metrics) -> str:
    """For whoever watches."""
    return (
        f"{figures.turns} turns in {figures.rounds} rounds, {figures.behind_hits} behind hits, "
        f"{figures.hung_up} hung up, {figures.resets} resets, "
        f"{found.total('vllm:num_preemptions_total'):,.0f} preemptions; tokens "
        f"{found.by('vllm:kvstrata_prompt_tokens_total', 'source')}, sent "
        f"{figures.sent_tokens} and {figures.hung_up_tokens}; evictions "
        f"{found.by('vllm:kvstrata_evictions_total', 'tier')}; faults "
        f"{found.by('vllm:kvstrata_tier_faults_total', 'kind')}, "
        f"{found.total('vllm:kvstrata_failed_loads_total'):.0f} failed loads, "
        f"{found.total('vllm:kvstrata_deadline_misses_total'):.0f} deadlines missed; scores "
        f"within {max(figures.differences):.0e}, most within {figures.usual_difference:.0e} "
        f"({figures.ties} ties); longest answer {figures.longest_s:.2f} s"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_answer_is_right_and_nothing_is_left(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    soak = Soak(FORMS[name], tmp_path, seed=1)
    server, figures = soak.server, soak.figures

    with running(server, soak.reference):
        soak.run(SECONDS)
        server.wait_until(lambda: is_at_rest(server))
        assert server.has_reset(), "blocks are still held"
        found = server.metrics()

    with capsys.disabled():
        print(f"\n{name}: {told(figures, found)}")  # noqa: T201 - the run's figures
    check_figures(soak.form, figures)
    check_metrics(soak.form, figures, found)
    assert not server.tracebacks


def check_figures(form: Form, figures: Figures) -> None:
    """It was a fair trial, and passed."""
    assert figures.behind_hits > 0
    assert figures.hung_up > 0
    assert figures.usual_difference <= form.tolerance / 10
    assert figures.longest_s < LOAD_DEADLINE_S + COMPUTE_BOUND_S


def check_metrics(form: Form, figures: Figures, found: Metrics) -> None:
    """The server knows what it has been through."""
    assert found.total("vllm:kvstrata_hit_tokens_total") > 0
    assert found.total("vllm:kvstrata_evictions_total", tier="host") > 0
    assert (found.total("vllm:num_preemptions_total") > 0) is form.is_crowded
    assert not found.total("vllm:kvstrata_hook_faults_total")
    # Each request is counted once, but for those that hung up before they were given blocks.
    requests = found.total("vllm:kvstrata_lookups_total")
    tokens = found.total("vllm:kvstrata_prompt_tokens_total")
    assert 0 <= requests - figures.turns <= figures.hung_up
    assert 0 <= tokens - figures.sent_tokens <= figures.hung_up_tokens
