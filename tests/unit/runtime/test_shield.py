"""An exception inside a hook is counted, logged once, and answered for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstrata.runtime.shield import shielded

if TYPE_CHECKING:
    from collections.abc import Callable


class Hooks:
    """Two hooks, one of which fails as it is told."""

    def __init__(self) -> None:
        self.hook_faults: Counter[str] = Counter()

    @shielded(lambda: -1)
    def answer(self, act: Callable[[], int]) -> int:
        """Whatever the act gives."""
        return act()

    @shielded(lambda: None)
    def other(self) -> None:
        """Fails always."""
        raise KeyError("other")


def fails() -> int:
    raise ZeroDivisionError


def test_what_goes_well_is_not_touched() -> None:
    hooks = Hooks()

    assert hooks.answer(lambda: 3) == 3
    assert not hooks.hook_faults
    assert hooks.answer.__doc__ == "Whatever the act gives."


def test_faults_are_counted_by_hook_and_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = Hooks()
    for _ in range(3):
        assert hooks.answer(fails) == -1
        hooks.other()

    assert hooks.hook_faults == {"answer": 3, "other": 3}
    assert len(caplog.records) == 2


def test_who_wants_to_stop_is_not_held() -> None:
    def stops() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hooks().answer(stops)
