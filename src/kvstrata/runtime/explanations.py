"""Why a request's hit was as long as it was.

Kept for the last requests, bounded. Facts are gathered when the answer is given, words are made
when somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind

if TYPE_CHECKING:
    from kvstrata.planning.load_plan import LoadPlan, Obstacle
    from kvstrata.runtime.chunk_history import ChunkHistory
    from kvstrata.runtime.tracked_request import TrackedRequest, Verdict

MOST_KEPT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Explanation:
    """The facts behind one answer."""

    request_id: str
    num_tokens: int
    plan: LoadPlan
    histories: tuple[str, ...]
    """What became of each obstacle's chunk."""
    verdict: Verdict

    def __str__(self) -> str:
        plan = self.plan
        summary = (
            f"{self.request_id}: {plan.num_tokens:,} of {self.num_tokens:,} tokens "
            f"({plan.local_tokens:,} on the device, {plan.external_tokens:,} loaded); "
            f"a complete cache would give {plan.possible_tokens:,}"
        )
        lines = [summary]
        if self.verdict.was_too_slow:
            lines.append("nothing was loaded: computing was expected to be faster")
        if self.verdict.ran_out_of_time:
            lines.append(f"the deadline passed after {self.verdict.waited_s:.1f} s")
        lines += map(_reason, plan.obstacles, self.histories)
        return "\n  ".join(lines)


class Explanations:
    """The last answers.

    Ownership: scheduler thread only.

    Args:
        history: what became of chunks.
    """

    def __init__(self, history: ChunkHistory) -> None:
        self._history = history
        self._kept: OrderedDict[str, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: TrackedRequest) -> None:
        """Remember the facts behind a request's last answer."""
        plan, verdict = request.plan, request.verdict
        if plan is None or verdict is None:
            return
        histories = tuple(
            self._history.tell(request.grid.key(obstacle.group_id, obstacle.chunk))
            if obstacle.chunk < request.grid.num_chunks(obstacle.group_id)
            else "not a complete chunk yet"
            for obstacle in plan.obstacles
        )
        self._kept[request.request_id] = Explanation(
            request.request_id,
            len(request.new.tokens),
            plan,
            histories,
            verdict,
        )
        self._kept.move_to_end(request.request_id)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def of(self, request_id: str) -> Explanation | None:
        """The facts behind a request's last answer, if they are kept still."""
        return self._kept.get(request_id)


def _reason(obstacle: Obstacle, history: str) -> str:
    what = (
        f"recurrent group {obstacle.group_id} has no state at {obstacle.tokens.stop:,}"
        if obstacle.kind is GroupKind.RECURRENT
        else f"{obstacle.kind} group {obstacle.group_id} has no chunk {obstacle.tokens}"
    )
    state = obstacle.lookup.name.lower()
    return f"stopped before token {obstacle.wanted_tokens:,}: {what} ({state}); {history}"
