"""Runs behind all others, whose names come earlier in the alphabet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .support import rounds

if TYPE_CHECKING:
    from kvstrata.testing.faults import Tally


def test_the_whole_run_kept_every_promise(whole_run: Tally) -> None:
    is_partial = not (whole_run.num_durable and whole_run.worst_excess and whole_run.num_timed)
    if is_partial:
        pytest.skip("only a part of the chaos suite ran")
    assert whole_run.num_faults >= rounds(short=300, full=10_000)
    whole_run.check()
