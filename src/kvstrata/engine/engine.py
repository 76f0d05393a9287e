"""The front door: a model directory in, answers out.

    engine = Engine("models/tiny-qwen3-next")
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))

Prompts and answers are token ids. The engine runs on the caller's thread.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kvstrata.engine.cache.grouping import CacheSettings, blocks_for_bytes
from kvstrata.engine.checkpoint import positive_number, read_config
from kvstrata.engine.options import EngineOptions
from kvstrata.engine.ranks import LocalRank, RankProcesses, RankSettings
from kvstrata.engine.scheduling.request import Request
from kvstrata.engine.scheduling.scheduler import Scheduler, SchedulerSettings
from kvstrata.engine.scheduling.step import SamplingParams
from kvstrata.errors import ClosedError, EngineError, LayoutError, ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.ranks import Ranks
    from kvstrata.engine.scheduling.request import FinishReason
    from kvstrata.engine.scheduling.step import StepResult
    from kvstrata.runtime.seam import RequestLimits, SchedulerConnector, WorkerConnector

_IDLE_S: Final = 0.001
"""How long to wait before asking again, when a step had nothing to compute."""


@dataclass(frozen=True, slots=True)
class ConnectorParts:
    """The two halves of a connector, to be made when the model's layout is known.

    Args:
        make_scheduler_half: called in this process.
        make_worker_half: called with the rank, in the rank's process: must travel there.
    """

    make_scheduler_half: Callable[[KVLayout], SchedulerConnector]
    make_worker_half: Callable[[int], WorkerConnector]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason
    local_hit_tokens: int
    """Tokens of the prompt that were on the device, the last time it was admitted."""
    external_hit_tokens: int
    """Tokens of the prompt that a connector loaded."""
    num_preemptions: int
    logits: list[list[float]]
    """The scores behind each token, if they were asked for."""


class NewToken(NamedTuple):
    """One token of a streamed answer."""

    request_id: str
    token: int
    finish_reason: FinishReason | None


class Engine:
    """A model that serves requests.

    Args:
        model_dir: config.json and safetensors.
        options: the user's choices.
        connector: loads and stores KV blocks, if there is one.

    Raises:
        ModelError: the directory cannot be used.
        LayoutError: the options leave no room for a cache.
    """

    def __init__(
        self,
        model_dir: str | Path,
        options: EngineOptions | None = None,
        connector: ConnectorParts | None = None,
    ) -> None:
        options = options or EngineOptions()
        folder = Path(model_dir)
        config = read_config(folder)
        settings = _scheduler_settings(options, config)
        self._connector: SchedulerConnector | None = None
        self._ids = itertools.count()
        self._logits: dict[str, list[list[float]]] = {}
        self._is_closed = False
        self._ranks: Ranks = _start_ranks(folder, options, connector)
        try:
            num_blocks = _num_blocks(self._ranks, options)
            if connector is not None:
                self._connector = connector.make_scheduler_half(self.layout)
            self._ranks.allocate(num_blocks)
            self.scheduler = Scheduler(self.layout, num_blocks, settings, self._connector)
            self._vocab_size = positive_number(config, "vocab_size")
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> KVLayout:
        """The model's KV groups."""
        return self._ranks.plan.layout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self, prompts: Iterable[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Answer]:
        """Answer prompts side by side; answers in the order of the prompts. Blocks.

        Raises:
            RequestError: a prompt cannot be served; none was started.
            EngineError: a rank was lost; the engine is closed.
        """
        requests = self._add_all(prompts, sampling)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            self._drop(requests)
        return [self.answer(request) for request in requests]

    def stream(
        self, prompts: Iterable[Sequence[int]], sampling: SamplingParams | None = None
    ) -> Generator[NewToken, None, None]:
        """Answer prompts side by side, token by token as they are drawn.

        A caller that stops listening aborts what is left.

        Raises:
            RequestError: a prompt cannot be served; none was started.
            EngineError: a rank was lost; the engine is closed.
        """
        requests = self._add_all(prompts, sampling)
        mine = {request.request_id for request in requests}
        try:
            while any(request.finish_reason is None for request in requests):
                yield from (new for new in self.step() if new.request_id in mine)
        finally:
            self._drop(requests)
            for request in requests:
                self._logits.pop(request.request_id, None)

    def add_request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        limits: RequestLimits | None = None,
    ) -> Request:
        """Take a request; it advances with every `step`.

        Raises:
            RequestError: it cannot be served; says what to change.
        """
        self._check_open()
        name = request_id or f"request-{next(self._ids)}"
        sampling = sampling or SamplingParams()
        try:
            tokens = self._checked(prompt)
            _check_sampling(sampling)
        except ValueError as error:
            raise RequestError(f"request {name!r}: {error}") from error
        request = Request(name, tokens, sampling, self.layout, cache_salt, limits)
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request early. Does nothing if it has ended, or the engine is closed."""
        if not self._is_closed:
            self.scheduler.abort(request_id)

    def step(self) -> list[NewToken]:
        """Run one step of all requests; the tokens that were drawn. Blocks while ranks compute.

        Raises:
            EngineError: a rank was lost; the engine is closed.
        """
        self._check_open()
        step = self.scheduler.schedule()
        try:
            results = self._ranks.execute(step.plan)
        except BaseException:  # a step that was interrupted, too, cannot be taken up again
            self.close()
            raise
        drawn = self.scheduler.update(step, results)
        self._keep_logits(results[0], drawn)
        if not step.plan.sequences:
            time.sleep(_IDLE_S)
        return [NewToken(r.request_id, r.tokens[-1], r.finish_reason) for r in drawn]

    def run_until_idle(self, step_limit: int = 1_000_000) -> None:
        """Step until no request lives and the connector has nothing under way.

        Raises:
            EngineError: that was not so after this many steps, or a rank was lost.
        """
        for _ in range(step_limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise EngineError(f"still at work after {step_limit} steps")

    def reset_cache(self) -> bool:
        """Forget every prefix on the device and in the connector; requests go on."""
        return self.scheduler.reset_cache()

    def answer(self, request: Request) -> Answer:
        """What became of a request that has ended; hands its scores over."""
        assert request.finish_reason is not None, "the request has not ended"
        return Answer(
            request.request_id,
            request.output,
            request.finish_reason,
            request.local_hit_tokens,
            request.external_hit_tokens,
            request.num_preemptions,
            self._logits.pop(request.request_id, []),
        )

    def close(self) -> None:
        """Stop ranks and connector. Does nothing on successive calls."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ranks.close()
        if self._connector:
            self._connector.close()

    def _add_all(
        self, prompts: Iterable[Sequence[int]], sampling: SamplingParams | None
    ) -> list[Request]:
        """Take all prompts or none."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.add_request(prompt, sampling))  # noqa: PERF401 - see below
        except RequestError:
            self._drop(requests)  # those before the bad one were taken already
            raise
        return requests

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.abort(request.request_id)

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's tokens; ValueError says what is wrong with them."""
        try:
            tokens = list(map(operator.index, prompt))
        except TypeError as error:
            raise ValueError(f"a prompt is a list of token ids ({error})") from error
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"token {token} is not in the vocabulary; accepted: 0 to {self._vocab_size - 1}"
                )
        return tokens

    def _keep_logits(self, result: StepResult, drawn: Iterable[Request]) -> None:
        for request in drawn:
            if request.sampling.keep_logits:
                kept = self._logits.setdefault(request.request_id, [])
                kept.append(result.logits[request.request_id])

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed")


def _start_ranks(folder: Path, options: EngineOptions, connector: ConnectorParts | None) -> Ranks:
    settings = RankSettings(
        folder=folder,
        dtype=options.dtype,
        device=options.device,
        cache=CacheSettings(
            kernel_block_tokens=options.kernel_block_tokens, state_tokens=options.state_tokens
        ),
        make_connector=None if connector is None else connector.make_worker_half,
    )
    if options.num_ranks == 1:
        return LocalRank(settings)
    return RankProcesses(settings, options.num_ranks)


def _num_blocks(ranks: Ranks, options: EngineOptions) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    num_blocks = blocks_for_bytes(ranks.plan, options.capacity_bytes)
    if num_blocks <= 1:
        block_bytes = ranks.plan.page_bytes * ranks.plan.num_storages
        raise LayoutError(
            f"cache_capacity is {options.cache_capacity}, but a KV block takes {block_bytes}B and "
            f"at least 2 are needed: raise it to {2 * block_bytes}B or more"
        )
    return num_blocks


def _check_sampling(sampling: SamplingParams) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature is {sampling.temperature}; accepted: 0 or more")


def _scheduler_settings(options: EngineOptions, config: dict[str, Any]) -> SchedulerSettings:
    longest = positive_number(config, "max_position_embeddings", 4096)
    wanted = options.max_request_tokens
    if wanted is not None and wanted > longest:
        raise ModelError(
            f"max_request_tokens is {wanted}, but the model's max_position_embeddings is {longest}"
        )
    return SchedulerSettings(
        max_step_tokens=options.max_step_tokens,
        max_running=options.max_running,
        max_request_tokens=longest if wanted is None else wanted,
    )
