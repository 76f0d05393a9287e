"""Keeps our faults away from the engine: an exception that left a hook would end it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Shielded(Protocol):
    """What an object with shielded hooks has."""

    hook_faults: Counter[str]
    """Exceptions that were kept from the engine, by hook."""


S = TypeVar("S", bound=Shielded)


def shielded(
    answer: Callable[[], T],
) -> Callable[[Callable[[S, *Ts], T]], Callable[[S, *Ts], T]]:
    """Give the engine this answer when a hook fails; each hook's first fault is logged."""

    def decorate(hook: Callable[[S, *Ts], T]) -> Callable[[S, *Ts], T]:
        @functools.wraps(hook)
        def guarded(self: S, /, *args: *Ts) -> T:
            try:
                return hook(self, *args)
            except Exception:  # noqa: BLE001 - that is what a shield is for
                self.hook_faults[hook.__name__] += 1
                if self.hook_faults[hook.__name__] == 1:
                    _log.exception("kvstrata: %s failed; the engine goes on", hook.__name__)
                return answer()

        return guarded

    return decorate
