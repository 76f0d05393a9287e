"""What the embedded engine costs: scheduling a step, and prefills beside `transformers`.

The scheduler is measured without a model: made-up tokens come back at once. Prefills run in turns
with `transformers` on the same checkpoint and prompt, on one thread.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.bench.planning import hybrid_layout
from kvstrata.bench.report import Goal, Report, Series
from kvstrata.core.spans import ceil_div
from kvstrata.engine.models.registry import ARCHITECTURES
from kvstrata.engine.scheduling.request import Request
from kvstrata.engine.scheduling.scheduler import Scheduler, SchedulerSettings
from kvstrata.engine.scheduling.step import SamplingParams, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.scheduling.scheduler import Step

_MAIN_ARCHITECTURE: Final = "llama"
_STEP_TOKENS: Final = 512
_VOCABULARY: Final = 256
_GOAL_MS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is scheduled and computed."""

    num_running: int = 64
    contexts: tuple[int, ...] = (1_024, 8_192, 32_768)
    main_context: int = 8_192
    """The one that goals are stated for."""
    num_steps: int = 528
    """From one state to the next: every request completes a block of every group."""
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    prompt_tokens: int = 2_000
    num_rounds: int = 15
    """Of prefills; the fastest counts."""


class StepTimes(NamedTuple):
    """Milliseconds of scheduling and updating, over many steps."""

    median_ms: float
    mean_ms: float
    slowest_ms: float


class PrefillRates(NamedTuple):
    """Tokens per second."""

    engine: float
    """The whole prompt in one step, or in two where a state is kept before its end."""
    in_chunks: float
    """In steps of 512 tokens."""
    reference: float

    @property
    def ratio(self) -> float:
        """The engine's rate as a multiple of the reference's."""
        return self.engine / self.reference


class Load:
    """A scheduler with many requests that have their prompts computed and are decoding.

    Args:
        layout: the groups.
        scale: how many requests, and how many steps they must last.
        context: tokens of each prompt, and up to a block more.
    """

    def __init__(self, layout: KVLayout, scale: Scale, context: int) -> None:
        self._layout = layout
        self._context = context
        self._answer_tokens = 3 * scale.num_steps  # nobody comes to an end
        self._random = random.Random(0)  # noqa: S311 - a workload, no secrets
        self._names = itertools.count()
        longest = context + layout.hash_block_tokens + self._answer_tokens
        blocks = sum(ceil_div(longest, group.block_tokens) for group in layout.groups)
        settings = SchedulerSettings(
            max_step_tokens=scale.num_running * longest,
            max_running=scale.num_running,
            max_request_tokens=longest,
        )
        self.scheduler = Scheduler(layout, scale.num_running * blocks + 1, settings)
        for _ in range(scale.num_running):
            self.add_request()
        while self._prefilling():
            self.step()
        self.scheduler.settings = replace(settings, max_step_tokens=_STEP_TOKENS)

    def add_request(self) -> None:
        """One more request, whose prompt ends anywhere in a block."""
        count = self._context + self._random.randrange(self._layout.hash_block_tokens)
        prompt = self._random.choices(range(_VOCABULARY), k=count)
        sampling = SamplingParams(max_tokens=self._answer_tokens)
        self.scheduler.add(Request(f"r{next(self._names)}", prompt, sampling, self._layout))

    def replace_oldest(self) -> None:
        """If all are decoding, the oldest makes room for a new prompt."""
        if not self._prefilling():
            self.scheduler.abort(next(iter(self.scheduler.requests)))
            self.add_request()

    def step(self) -> float:
        """Schedule and update once; the seconds that took."""
        start = time.perf_counter()
        step = self.scheduler.schedule()
        scheduled = time.perf_counter()
        results = _made_up(step)
        computed = time.perf_counter()
        self.scheduler.update(step, results)
        return time.perf_counter() - computed + scheduled - start

    def _prefilling(self) -> bool:
        return any(not request.output for request in self.scheduler.requests.values())


def run(scale: Scale | None = None) -> Report:
    """Measure steps of the scheduler, and prefills where what they need is installed."""
    scale = scale or Scale()
    steps = {context: step_times(scale, context) for context in scale.contexts}
    rates = prefill_rates(scale)
    return Report(
        name="engine",
        setting=(
            f"schedule and update with {scale.num_running} running requests and 8 groups (2 full, "
            f"3 window, 3 recurrent), {scale.num_steps} steps, no model; "
            f"{_describe_prefills(scale, rates)}"
        ),
        goals=(*_step_goals(*steps[scale.main_context]), *_prefill_goals(rates)),
        series=(_steps_series(steps), *_prefill_series(rates)),
    )


def step_times(scale: Scale, context: int) -> tuple[StepTimes, StepTimes]:
    """While all decode; while one after the other has its prompt computed in chunks."""
    load = Load(hybrid_layout(), scale, context)
    decoding = _times(load.step, scale.num_steps)

    def mixed_step() -> float:
        load.replace_oldest()
        return load.step()

    return decoding, _times(mixed_step, scale.num_steps)


def _times(step: Callable[[], float], num_steps: int) -> StepTimes:
    gc.collect()
    took_ms = [step() * 1e3 for _ in range(num_steps)]
    return StepTimes(statistics.median(took_ms), statistics.fmean(took_ms), max(took_ms))


def _made_up(step: Step) -> list[StepResult]:
    """What ranks would say, without having computed anything."""
    sequences = step.plan.sequences
    tokens = {s.request_id: s.stop % _VOCABULARY for s in sequences if s.sampling}
    return [StepResult(tokens)]


def prefill_rates(scale: Scale) -> dict[str, PrefillRates]:
    """By architecture; none if torch or transformers is not installed."""
    source = random.Random(0)  # noqa: S311 - a workload, no secrets
    prompt = source.choices(range(_VOCABULARY), k=scale.prompt_tokens)
    rates = {}
    try:
        for arch in scale.architectures:
            with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
                rates[arch] = _race(arch, Path(folder), prompt, scale.num_rounds)
    except ModuleNotFoundError:
        return {}
    return rates


def _race(arch: str, folder: Path, prompt: Sequence[int], num_rounds: int) -> PrefillRates:
    """Compute one prompt in turns; all three know the same next token."""
    from kvstrata.engine import Engine, EngineOptions  # noqa: PLC0415 - needs torch
    from kvstrata.engine.reference import Reference, one_thread  # noqa: PLC0415 - the same
    from kvstrata.engine.tiny import make_tiny  # noqa: PLC0415

    make_tiny(arch, folder)
    reference = Reference(folder)
    sampling = SamplingParams(max_tokens=1)

    def prefill(engine: Engine) -> int:
        engine.reset_cache()
        [answer] = engine.generate([prompt], sampling)
        return answer.tokens[0]

    with (
        one_thread(),
        Engine(folder, EngineOptions(max_step_tokens=len(prompt))) as at_once,
        Engine(folder, EngineOptions(max_step_tokens=_STEP_TOKENS)) as in_chunks,
    ):
        rounds = [
            [
                _timed(lambda: prefill(at_once)),
                _timed(lambda: prefill(in_chunks)),
                _timed(lambda: reference.prefill(prompt)),
            ]
            for _ in range(num_rounds)
        ]
    assert len({token for timings in rounds for token, _ in timings}) == 1, arch
    fastest = [min(took_s for _, took_s in runs) for runs in zip(*rounds, strict=True)]
    return PrefillRates(*(len(prompt) / took_s for took_s in fastest))


def _timed(work: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    token = work()
    return token, time.perf_counter() - start


def _describe_prefills(scale: Scale, rates: dict[str, PrefillRates]) -> str:
    if not rates:
        return "no prefills: torch or transformers is not installed"
    return (
        f"prefills of one {scale.prompt_tokens:,}-token prompt on tiny models in float32, in turns "
        f"with transformers (with its cache), one thread, fastest of {scale.num_rounds}"
    )


def _step_goals(decoding: StepTimes, mixed: StepTimes) -> Iterator[Goal]:
    yield Goal("a step while all decode", decoding.median_ms, _GOAL_MS, "ms (median)")
    yield Goal("a step with a chunk of a prefill", mixed.median_ms, _GOAL_MS, "ms (median)")


def _prefill_goals(rates: dict[str, PrefillRates]) -> Iterator[Goal]:
    unit = "of transformers"
    if _MAIN_ARCHITECTURE in rates:
        ratio = rates[_MAIN_ARCHITECTURE].ratio
        yield Goal(f"prefill, {_MAIN_ARCHITECTURE}", ratio, 1.0, unit, "at least")
    if rates:
        worst = min(rates, key=lambda arch: rates[arch].ratio)
        yield Goal(f"prefill, worst ({worst})", rates[worst].ratio, 1.0, unit, "at least")


def _steps_series(steps: dict[int, tuple[StepTimes, StepTimes]]) -> Series:
    columns = itertools.product(("decode", "with prefill"), ("median", "mean", "slowest"))
    return Series(
        "Milliseconds of a step, by tokens of each request",
        "tokens",
        tuple(f"{what}, {which}" for what, which in columns),
        tuple((context, (*decoding, *mixed)) for context, (decoding, mixed) in steps.items()),
    )


def _prefill_series(rates: dict[str, PrefillRates]) -> Iterator[Series]:
    if rates:
        yield Series(
            "Prefill, thousand tokens/s",
            "model",
            ("engine", f"in steps of {_STEP_TOKENS}", "transformers", "engine / transformers"),
            tuple(
                (arch, (*(rate / 1e3 for rate in found), found.ratio))
                for arch, found in rates.items()
            ),
        )
