"""Loads under way in several connectors: each ends once, by the one that was asked for it.

Ownership: scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.runtime.multi_child import ChildState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.runtime.multi_child import GuardedChild
    from kvstrata.runtime.seam import BlockTables


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way."""

    child: GuardedChild | None
    """The one that was asked for it; None: nobody had promised it."""
    num_tokens: int
    tables: BlockTables
    """Where it writes to."""
    started_s: float
    """When it was asked for."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody will report it: its blocks do not hold what was promised."""
        return self.child is None or self.child.state is ChildState.STOPPED

    @property
    def is_unsafe(self) -> bool:
        """Whether a rank may write to its blocks even after it was ended."""
        return self.child is not None and self.child.is_unclean


class MultiLoads:
    """The loads of all children, by request."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def start(self, request_id: str, load: Load) -> None:
        """A child, or nobody, was asked for a load."""
        self._loads[request_id] = load
        if load.child is not None:
            load.child.tally.loads += 1

    def end_done(self, child: GuardedChild, request_ids: frozenset[str]) -> frozenset[str]:
        """End loads that a child has done; returns those that it was asked for."""
        own = self._own(child, request_ids)
        child.tally.loaded_tokens += sum(self._loads.pop(name).num_tokens for name in own)
        return own

    def end_failed(self, child: GuardedChild, request_ids: frozenset[str]) -> frozenset[str]:
        """End loads that failed in a child; returns those that it was asked for."""
        own = self._own(child, request_ids)
        child.tally.failed_loads += len(own)
        for request_id in own:
            del self._loads[request_id]
        return own

    def take_lost(self) -> dict[str, Load]:
        """End the loads that nobody will report."""
        lost = {name: load for name, load in self._loads.items() if load.is_lost}
        for request_id, load in lost.items():
            del self._loads[request_id]
            if load.child is not None:
                load.child.tally.failed_loads += 1
        return lost

    def late(self, before_s: float) -> list[GuardedChild]:
        """Children in use that were asked for a load before this time and have not reported it."""
        late = [load.child for load in self._loads.values() if load.started_s < before_s]
        return [child for child in late if child is not None and child.is_active]

    def pending(self, children: Iterable[GuardedChild]) -> Sequence[int]:
        """Loads under way in each child."""
        asked = [load.child for load in self._loads.values()]
        return [sum(child is other for other in asked) for child in children]

    def _own(self, child: GuardedChild, request_ids: frozenset[str]) -> frozenset[str]:
        """Those that a child was asked for; the others are counted."""
        own = frozenset(
            name for name in request_ids if name in self._loads and self._loads[name].child is child
        )
        child.tally.stray_reports += len(request_ids) - len(own)
        return own
