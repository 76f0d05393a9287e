"""Saves that outlive their requests: a request's blocks are freed when its last saver is done.

Beside the scheduler `Saves` notes who saves what; beside each rank `RankSaves` tells the engine
once, when everybody who said so has reported on that rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


class Saves:
    """All saves, beside the scheduler. Scheduler thread only."""

    def __init__(self) -> None:
        self._savers: dict[str, set[str]] = {}
        self._unsent: dict[str, list[str]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether somebody saves a request."""
        return request_id in self._savers

    def add(self, request_id: str, child: str) -> None:
        """A child saves a request that has ended. Does nothing on successive calls."""
        if child not in self._savers.setdefault(request_id, set()):
            self._savers[request_id].add(child)
            self._unsent.setdefault(request_id, []).append(child)

    def take_unsent(self) -> dict[str, list[str]]:
        """Hand over who saves what, since the last time."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def end(self, request_ids: Iterable[str]) -> dict[str, set[str]]:
        """End saves that every rank has reported; returns who saved them."""
        return {name: self._savers.pop(name) for name in request_ids if name in self._savers}


class RankSaves:
    """The saves of one rank. Its thread only."""

    def __init__(self) -> None:
        self._savers: dict[str, set[str]] = {}

    def expect(self, savers: Mapping[str, Iterable[str]]) -> None:
        """Children save requests that have ended."""
        for request_id, children in savers.items():
            self._savers.setdefault(request_id, set()).update(children)

    def has(self, child: str) -> bool:
        """Whether a child has saves under way."""
        return any(child in children for children in self._savers.values())

    def report(self, child: str, request_ids: Iterable[str]) -> int:
        """A child is done with requests; returns how many it was not expected to save."""
        num_strays = 0
        for request_id in request_ids:
            children = self._savers.get(request_id, set())
            num_strays += child not in children
            children.discard(child)
        return num_strays

    def take_done(self, closed: Container[str]) -> set[str]:
        """Hand over the requests that everybody is done with who is not closed."""
        done = {
            name
            for name, children in self._savers.items()
            if all(child in closed for child in children)
        }
        for name in done:
            del self._savers[name]
        return done
