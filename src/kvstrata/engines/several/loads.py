"""Loads under way in several connectors: each ends once, by the one that was asked for it.

Beside the scheduler `Loads` says what ranks must know; beside each rank `RankLoads` passes on what
the engine waits for, and nothing else. A load whose child was stopped before its ranks heard of it
is lost: every rank reports it as failed, because the request waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata.runtime.seam import EndedLoads

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way."""

    child: str | None
    """The one that was asked for it; None: nobody."""
    num_tokens: int
    blocks: frozenset[int]
    """The request's blocks, in all groups."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What ranks must know about the loads of a step."""

    started: dict[str, Load] = field(default_factory=dict)
    """Loads that requests wait for, by request."""
    lost: tuple[str, ...] = ()
    """Requests that wait for loads which nobody does."""
    in_step: tuple[Load, ...] = ()
    """Loads that nobody waits for: they must be there before the step computes."""


class Loads:
    """All loads, beside the scheduler. Scheduler thread only."""

    def __init__(self) -> None:
        self._awaited: dict[str, Load] = {}
        self._unsent: list[str] = []
        self._in_step: list[Load] = []

    def __contains__(self, request_id: str) -> bool:
        """Whether a request waits for a load."""
        return request_id in self._awaited

    def start(self, request_id: str, load: Load) -> None:
        """A request waits for a load from now on."""
        self._awaited[request_id] = load
        self._unsent.append(request_id)

    def start_in_step(self, load: Load) -> None:
        """A request goes on with the next step, which has the load."""
        self._in_step.append(load)

    def take_orders(self, reached: Container[str | None]) -> Orders:
        """What ranks must know; loads of children that ranks do not hear of are lost."""
        unsent, self._unsent = self._unsent, []
        in_step, self._in_step = self._in_step, []
        started = {name: self._awaited[name] for name in unsent}
        return Orders(
            {name: load for name, load in started.items() if load.child in reached},
            tuple(name for name, load in started.items() if load.child not in reached),
            tuple(load if load.child in reached else _nobodys(load) for load in in_step),
        )

    def end(self, request_ids: Iterable[str]) -> dict[str, Load]:
        """End loads that every rank has reported; those that nobody waited for are left out."""
        return {name: self._awaited.pop(name) for name in request_ids if name in self._awaited}

    def num_pending(self, child: str) -> int:
        """Loads of a child that requests wait for."""
        return sum(load.child == child for load in self._awaited.values())


class RankLoads:
    """The loads of one rank. Its thread only."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._in_step: tuple[Load, ...] = ()
        self._done: set[str] = set()
        self._failed: set[str] = set()

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        self._loads |= orders.started
        self._loads |= {name: Load(None, 0, frozenset()) for name in orders.lost}
        self._in_step = orders.in_step

    def has(self, child: str) -> bool:
        """Whether a child has loads under way."""
        return any(load.child == child for load in self._loads.values())

    def report(self, child: str, done: Iterable[str], failed: Iterable[str]) -> int:
        """A child says that loads ended; returns how many it was not asked for."""
        said = set(done) | set(failed)
        own = {name for name in said if self._is_of(child, name)}
        self._done |= own
        self._failed |= own.intersection(failed)
        return len(said) - len(own)

    def report_blocks(self, child: str, blocks: Iterable[int]) -> int:
        """A child says that blocks did not arrive; returns how many of them are in no load."""
        bad = set(blocks)
        known: set[int] = set()
        for name, load in self._loads.items():
            if load.child == child and not bad.isdisjoint(load.blocks):
                self._failed.add(name)
                known |= bad & load.blocks
        return len(bad - known)

    def take_ended(self, closed: Container[str]) -> EndedLoads:
        """Hand over what has ended, with the loads of children that are closed, as failed."""
        given_up = {
            name for name, load in self._loads.items() if load.child is None or load.child in closed
        }
        ended = self._done | given_up
        failed = (given_up - self._done) | (self._failed & ended)
        for name in ended:
            del self._loads[name]
        self._done -= ended
        self._failed -= ended
        return EndedLoads(frozenset(ended - failed), frozenset(failed))

    def unfilled_blocks(self, closed: Container[str]) -> set[int]:
        """Blocks that this step should have had, but nobody loaded."""
        return {
            block
            for load in self._in_step
            if load.child is None or load.child in closed
            for block in load.blocks
        }

    def _is_of(self, child: str, request_id: str) -> bool:
        return request_id in self._loads and self._loads[request_id].child == child


def _nobodys(load: Load) -> Load:
    return Load(None, load.num_tokens, load.blocks)
