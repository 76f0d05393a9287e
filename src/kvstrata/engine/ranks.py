"""Two ways to run the ranks of a model: in this process, or one process each.

The scheduler talks to either through `Ranks`. Processes are spawned, load their own part of the
weights, meet over gloo, and get one message per step; a rank that dies or stays silent ends the
engine with an error that says which. An answer belongs to the last question: who stops waiting for
one must close the ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.scheduling.step import StepResult
from kvstrata.errors import EngineError, KVStrataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from kvstrata.engine.cache.grouping import CachePlan, CacheSettings
    from kvstrata.engine.scheduling.step import StepPlan
    from kvstrata.runtime.seam import WorkerConnector

_START_S: Final = 120.0
_STEP_S: Final = 600.0
_STOP_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0
"""How long to listen to the others when one rank has failed: the cause may lie with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What every rank needs to start. Travels to other processes."""

    folder: Path
    dtype: str = "auto"
    device: str = "cpu"
    cache: CacheSettings | None = None
    make_connector: Callable[[int], WorkerConnector] | None = None
    """Makes a rank's half of the connector in the rank's own process."""


class Ranks(Protocol):
    """All ranks of one model."""

    @property
    def plan(self) -> CachePlan:
        """How the caches share memory."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches on every rank; once, before the first step."""
        ...

    def execute(self, step: StepPlan) -> Sequence[StepResult]:
        """Run one step on every rank; results in the order of the ranks. Blocks.

        Raises:
            EngineError: a rank died, failed or did not answer; says which.
        """
        ...

    def close(self) -> None:
        """Stop all ranks. Does nothing on successive calls."""
        ...


class Rank:
    """One rank: a model runner and, perhaps, a connector's worker half.

    Args:
        settings: what every rank gets.
        place: which rank this is.
    """

    def __init__(self, settings: RankSettings, place: TensorParallel) -> None:
        self._runner = ModelRunner(
            settings.folder,
            place,
            dtype=settings.dtype,
            device=settings.device,
            settings=settings.cache,
        )
        make = settings.make_connector
        self._connector = None if make is None else make(place.rank)

    @property
    def plan(self) -> CachePlan:
        """How the caches share memory."""
        return self._runner.plan

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches and show them to the connector."""
        tensors = self._runner.allocate(num_blocks)
        if self._connector:
            self._connector.register_caches(self.plan.layout, tensors, num_blocks)

    def execute(self, step: StepPlan) -> StepResult:
        """Run one step, the connector's work around it."""
        if self._connector is None or step.connector_message is None:
            return self._runner.execute(step)
        self._connector.start_step(step.connector_message)
        result = self._runner.execute(step)
        return StepResult(result.tokens, result.logits, self._connector.finish_step())

    def close(self) -> None:
        """Close the connector."""
        if self._connector:
            self._connector.close()


class LocalRank:
    """The only rank, in this process."""

    def __init__(self, settings: RankSettings) -> None:
        self._rank = Rank(settings, TensorParallel())

    @property
    def plan(self) -> CachePlan:
        """How the caches share memory."""
        return self._rank.plan

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches."""
        self._rank.allocate(num_blocks)

    def execute(self, step: StepPlan) -> Sequence[StepResult]:
        """Run one step."""
        try:
            return [self._rank.execute(step)]
        except KVStrataError:
            raise
        except Exception as error:
            raise _failure(0, error) from error

    def close(self) -> None:
        """Close the connector."""
        self._rank.close()


class RankProcesses:
    """One process per rank, joined by pipes.

    Args:
        settings: what every rank gets.
        num_ranks: how many.

    Raises:
        ModelError: the model cannot be used; as the ranks said.
        EngineError: a rank died while it started.
    """

    def __init__(self, settings: RankSettings, num_ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._meeting = tempfile.TemporaryDirectory(prefix="kvstrata-ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = spawn.Pipe()
            place = TensorParallel(rank, num_ranks)
            process = spawn.Process(
                target=_serve,
                args=(settings, place, self._meeting.name, theirs),
                name=f"kvstrata-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self.plan: CachePlan = self._replies(_START_S)[0]
        except BaseException:
            self.close()
            raise

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches on every rank."""
        self._ask("allocate", num_blocks)

    def execute(self, step: StepPlan) -> Sequence[StepResult]:
        """Run one step on every rank."""
        return self._ask("execute", step)

    def close(self) -> None:
        """Ask all processes to end, and end those that do not."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._meeting.cleanup()

    def _ask(self, action: str, argument: object) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((action, argument))
            except OSError as error:
                raise EngineError(self._obituary(rank)) from error
        return self._replies(_STEP_S)

    def _replies(self, timeout_s: float) -> list[Any]:
        """One reply of every rank; a death or an error of any of them is raised here."""
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while silent := {rank: p for rank, p in enumerate(self._pipes) if rank not in replies}:
            ready = wait(silent.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            replies |= {rank: self._receive(rank) for rank, pipe in silent.items() if pipe in ready}
            if any(isinstance(reply, Exception) for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        for reply in replies.values():
            if isinstance(reply, Exception):
                raise reply
        if silent:
            raise EngineError(f"rank {min(silent)} did not answer for {timeout_s:.0f} s")
        return [replies[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Any:  # noqa: ANN401 - whatever was asked
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError) as error:
            raise EngineError(self._obituary(rank)) from error

    def _obituary(self, rank: int) -> str:
        """How a rank ended."""
        process = self._processes[rank]
        process.join(_STOP_S)
        code = process.exitcode
        if code is None:
            return f"rank {rank} no longer listens"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"rank {rank} died ({how})"


def _serve(settings: RankSettings, place: TensorParallel, meeting: str, pipe: Connection) -> None:
    """A rank's process: start, then answer until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process says when to end
    torch.set_num_threads(max(1, torch.get_num_threads() // place.size))
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        try:
            rank = _start(settings, place, meeting)
        except Exception as error:  # noqa: BLE001 - it is raised again in the engine's process
            pipe.send(_failure(place.rank, error))
            return
        try:
            pipe.send(rank.plan)
            while True:
                action, argument = pipe.recv()
                pipe.send(_answer(rank, place, action, argument))
        finally:
            rank.close()
            dist.destroy_process_group()


def _start(settings: RankSettings, place: TensorParallel, meeting: str) -> Rank:
    rank = Rank(settings, place)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(meeting) / 'ranks'}",
        rank=place.rank,
        world_size=place.size,
    )
    return rank


def _answer(
    rank: Rank,
    place: TensorParallel,
    action: str,
    argument: Any,  # noqa: ANN401 - a message
) -> object:
    try:
        if action == "execute":
            return rank.execute(argument)
        rank.allocate(argument)
    except Exception as error:  # noqa: BLE001 - it is raised again in the engine's process
        return _failure(place.rank, error)
    return None


def _failure(rank: int, error: Exception) -> KVStrataError:
    """An error of ours as it is, any other with the rank's name."""
    if isinstance(error, KVStrataError):
        return error
    return EngineError(f"rank {rank} failed: {error!r}")
