"""An engine with offloading that serves one prompt at a time, under observation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from kvstrata.config.parsing import parse_config
from kvstrata.engine import ConnectorParts, Engine, EngineOptions, SamplingParams
from kvstrata.engine.offloading import offloading
from kvstrata.runtime.scheduler_side import SchedulerSide
from kvstrata.showcase.device_memory import DeviceMemory, WatchedWorker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvstrata.config.schema import Config
    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.explanations import Explanation
    from kvstrata.runtime.seam import SchedulerConnector, WorkerConnector
    from kvstrata.showcase.device_memory import BlockBytes
    from kvstrata.telemetry.metrics import Metric

OPTIONS: Final = EngineOptions(cache_capacity="64MiB")
SAMPLING: Final = SamplingParams(max_tokens=8, keep_logits=True)


@dataclass(frozen=True, slots=True)
class Serving:
    """One prompt served."""

    request_id: str
    first_token_s: float
    """Seconds from the request's arrival to its first token."""
    tokens: list[int]
    logits: list[list[float]]
    local_tokens: int
    """Tokens found on the device."""
    loaded_tokens: int
    """Tokens loaded from host memory, wherever they were before."""
    blocks: tuple[BlockBytes, ...] = ()
    """Device memory after the first token, by group."""


def serve(engine: Engine, prompt: Sequence[int], memory: DeviceMemory | None = None) -> Serving:
    """Answer a prompt; with a look at the device memory, if there is one to look at."""
    start = time.perf_counter()
    request = engine.add_request(prompt, SAMPLING)
    while not request.output:
        engine.step()
    first_token_s = time.perf_counter() - start
    tables = [table.blocks for table in request.tables]
    blocks = () if memory is None else memory.read(tables, request.computed)
    while request.finish_reason is None:
        engine.step()
    answer = engine.answer(request)
    return Serving(
        answer.request_id,
        first_token_s,
        answer.tokens,
        answer.logits,
        answer.local_hit_tokens,
        answer.external_hit_tokens,
        blocks,
    )


class ObservedEngine:
    """An engine with offloading whose memory and figures can be looked at.

    Args:
        folder: the model.
        tiers: settings of the tiers below host memory.
    """

    def __init__(self, folder: Path, tiers: Sequence[Mapping[str, Any]] = ()) -> None:
        self._memory = DeviceMemory()
        self._parts = offloading(_config(tiers), folder)
        parts = ConnectorParts(self._make_scheduler_half, self._make_worker_half)
        self._engine = Engine(folder, OPTIONS, parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()

    @property
    def layout(self) -> KVLayout:
        """The model's groups."""
        return self._engine.layout

    @property
    def side(self) -> SchedulerSide:
        """The scheduler half."""
        return self._side

    def serve(self, prompt: Sequence[int]) -> Serving:
        """Answer a prompt, and wait until everything that it led to has come to rest."""
        serving = serve(self._engine, prompt, self._memory)
        self._engine.run_until_idle()
        return serving

    def lose_device(self) -> None:
        """Throw the device cache away: nothing can be found, and the memory is overwritten."""
        self._engine.scheduler.blocks.pool.forget_all()
        self._memory.overwrite()

    def lose_host(self) -> None:
        """Throw away what is in host memory."""
        self._side.reset()

    def total(self, metric: Metric, *labels: str) -> float:
        """A figure of the runtime, over all labels or for some."""
        return sum(
            sample.value
            for sample in self._side.stats()
            if sample.name == metric.name and (not labels or sample.labels == labels)
        )

    def explain(self, serving: Serving) -> Explanation:
        """Why a hit was as long as it was."""
        explanation = self._side.explain(serving.request_id)
        assert explanation is not None, "it is among the last"
        return explanation

    def _make_scheduler_half(self, layout: KVLayout) -> SchedulerConnector:
        side = self._parts.make_scheduler_half(layout)
        assert isinstance(side, SchedulerSide), "that is what offloading makes"
        self._side = side
        return side

    def _make_worker_half(self, rank: int) -> WorkerConnector:
        return WatchedWorker(self._parts.make_worker_half(rank), self._memory)


def _config(tiers: Sequence[Mapping[str, Any]]) -> Config:
    """Every hit is loaded, however long it takes: restores are what is to be seen."""
    return parse_config(
        {
            "host": {"capacity": "128MiB"},
            "tiers": list(tiers),
            "load": {"deadline": "60s", "decide": "always"},
        }
    )
