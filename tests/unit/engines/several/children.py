"""Children for tests: a name, what it is worth, and an object that is guarded."""

from __future__ import annotations

from typing import Any

from kvstrata.engines.several.guard import GuardedChild
from kvstrata.engines.several.settings import ChildSettings


def a_child(
    name: str = "a",
    *,
    load_weight: float = 1.0,
    match_deadline_s: float = 1.0,
    connector: Any = None,  # noqa: ANN401 - anything is guarded
) -> GuardedChild[Any]:
    settings = ChildSettings("connectors[0]", name, load_weight, match_deadline_s, {})
    return GuardedChild(settings, connector)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
