"""Children that answer and raise on demand, and what surrounds them, without an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstrata.runtime.multi_connector import Child, MultiScheduler, MultiWorker
from kvstrata.runtime.seam import BlockView, EndedLoads, Match, NewRequest, StepProgress
from kvstrata.testing.builders import a_layout, full_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.seam import BlockTables, SchedulerContext
    from kvstrata.transfers.cache_views import LayerCache

LAYOUT = a_layout(full_group(16))
EMPTY = StepProgress(())
TABLES = ((0, 1, 2, 3),)


class FakeContext:
    """A pool whose block 0 is the null block."""

    def __init__(self) -> None:
        self.holds: Counter[int] = Counter()
        self.tables: BlockTables = TABLES

    def get_block(self, block_id: int) -> BlockView:
        return BlockView(block_id, self.holds[block_id], None, None, block_id == 0)

    def touch(self, block_ids: Iterable[int]) -> None:
        self.holds.update(block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        self.holds.subtract(block_ids)

    def iter_free_blocks(self, after: BlockView | None = None) -> Iterator[BlockView]:
        del after
        return iter(())

    def request_blocks(self, request_id: str) -> BlockTables:
        del request_id
        return self.tables

    def waiting_requests(self) -> Sequence[str]:
        return ()


class FakeScheduler:
    """Answers as it is told to, and raises where it is told to."""

    def __init__(self, *answers: int | None, raises: Iterable[str] = ()) -> None:
        self.answers = list(answers) or [0]
        self.raises = set(raises)
        self.calls: list[tuple[Any, ...]] = []
        self.ended = EndedLoads()
        self.can_reset = True
        self.events: list[object] = []
        self.is_pending = False

    @property
    def has_pending_work(self) -> bool:
        self._call("has_pending_work")
        return self.is_pending

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context
        self._call("bind_scheduler_context")

    def add_request(self, request: NewRequest) -> None:
        self._call("add_request", request.request_id)

    def match(self, request_id: str, local_tokens: int) -> Match | None:
        self._call("match", request_id, local_tokens)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return None if answer is None else Match(answer)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        self._call("allocated", request_id, tables, external_tokens)

    def plan_step(self, progress: StepProgress) -> bytes:
        self._call("plan_step", tuple(progress.preempted))
        return b"plan"

    def report(self, reports: Sequence[bytes]) -> EndedLoads:
        self._call("report", tuple(reports))
        ended, self.ended = self.ended, EndedLoads()
        return ended

    def finished(self, request_id: str) -> None:
        self._call("finished", request_id)

    def reset(self) -> bool:
        self._call("reset")
        return self.can_reset

    def take_events(self) -> Sequence[object]:
        self._call("take_events")
        return self.events

    def close(self) -> None:
        self._call("close")

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _call(self, name: str, *values: object) -> None:
        self.calls.append((name, *values))
        if name in self.raises:
            raise RuntimeError(name)


class FakeWorker:
    """Says its rank's name."""

    def __init__(self, raises: Iterable[str] = ()) -> None:
        self.raises = set(raises)
        self.calls: list[str] = []

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        del layout, caches, num_blocks
        self._call("register_caches")

    def start_step(self, message: bytes) -> None:
        assert message == b"plan"
        self._call("start_step")

    def finish_step(self) -> bytes:
        self._call("finish_step")
        return b"said"

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise RuntimeError(name)


@dataclass
class Rig:
    """Several fakes on some ranks, without an engine."""

    schedulers: dict[str, FakeScheduler]
    workers: list[dict[str, FakeWorker]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.workers = self.workers or [{name: FakeWorker() for name in self.schedulers}]
        self.context = FakeContext()
        children = [
            Child(name, half, self.weights.get(name, 1.0), self.deadlines.get(name, 1.0))
            for name, half in self.schedulers.items()
        ]
        self.multi = MultiScheduler(children, LAYOUT, lambda: self.now)
        self.multi.bind_scheduler_context(self.context)
        self.ranks = [MultiWorker(list(workers.items())) for workers in self.workers]
        for rank in self.ranks:
            rank.register_caches(LAYOUT, {}, 8)

    def add(self, request_id: str = "r", num_tokens: int = 65) -> None:
        self.multi.add_request(NewRequest(request_id, (), range(num_tokens), num_tokens))

    def admit(self, request_id: str = "r", local_tokens: int = 0) -> int | None:
        """Ask, and give the request blocks if the answer is there."""
        match = self.multi.match(request_id, local_tokens)
        if match is None:
            return None
        self.multi.allocated(request_id, TABLES, match.external_tokens)
        return match.external_tokens

    def step(self, progress: StepProgress = EMPTY) -> EndedLoads:
        message = self.multi.plan_step(progress)
        reports = []
        for rank in self.ranks:
            rank.start_step(message)
            reports.append(rank.finish_step())
        ended = self.multi.report(reports)
        self.multi.check_invariants()
        return ended

    def allocated_tokens(self, name: str) -> list[int]:
        return [call[2] for call in self.schedulers[name].named("allocated")]
