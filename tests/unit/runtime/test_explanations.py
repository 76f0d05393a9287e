"""Why a hit was as long as it was, in words that name the group, the place and the past."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.ids import ChunkKey, GroupId
from kvstrata.core.lookups import ChunkLookup
from kvstrata.planning.load_plan import LoadBounds, LoadPlan, choose_load
from kvstrata.runtime import chunk_history, explanations
from kvstrata.runtime.chunk_history import ChunkHistory
from kvstrata.runtime.explanations import Explanations
from kvstrata.runtime.tracked_request import TrackedRequest, Verdict
from kvstrata.testing.builders import (
    a_geometry,
    a_layout,
    full_group,
    lookups_with,
    recurrent_group,
    window_group,
)

from .requests import a_request

if TYPE_CHECKING:
    import pytest

GEOMETRY = a_geometry(
    a_layout(full_group(16), window_group(32, 16), recurrent_group(512)), 64, 16, 512
)
NUM_TOKENS = 2000
PROMPTLY = Verdict(0.0, ran_out_of_time=False, was_too_slow=False)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_no_tier(_key: ChunkKey) -> tuple[str, ...]:
    return ()


def on_disk(_key: ChunkKey) -> tuple[str, ...]:
    return ("disk",)


def answered(
    missing: tuple[int, int] | None = None,
    verdict: Verdict = PROMPTLY,
    lookup: ChunkLookup = ChunkLookup.ABSENT,
) -> TrackedRequest:
    """A request whose hit one missing chunk made shorter."""
    request = a_request(GEOMETRY, NUM_TOKENS)
    lookups = lookups_with(
        GEOMETRY, NUM_TOKENS, missing=[missing] if missing else (), lookup=lookup
    )
    request.plan = choose_load(GEOMETRY, lookups, LoadBounds(NUM_TOKENS))
    request.verdict = verdict
    return request


def test_a_state_that_was_evicted_and_never_written() -> None:
    clock = Clock()
    history = ChunkHistory(clock, ["disk"])
    kept = Explanations(history)
    request = answered((2, 2))
    history.left([request.grid.key(GroupId(2), 2)], in_no_tier)
    clock.now += 12
    kept.keep(request)

    assert str(kept.of("request")) == (
        "request: 1,024 of 2,000 tokens (0 on the device, 1,024 loaded); "
        "a complete cache would give 1,536\n"
        "  stopped before token 1,536: recurrent group 2 has no state at 1,536 (absent); "
        "evicted 12 s ago from host, never written to disk"
    )


def test_a_chunk_that_was_on_disk_when_it_left() -> None:
    clock = Clock()
    history = ChunkHistory(clock, ["disk", "bucket"])
    request = answered((0, 3))
    history.left([request.grid.key(GroupId(0), 3)], on_disk)
    kept = Explanations(history)
    kept.keep(request)
    text = str(kept.of("request"))

    assert "full group 0 has no chunk [192, 256) (absent)" in text
    assert "evicted 0 s ago from host, never written to bucket, was then in disk" in text


def test_a_chunk_that_was_never_seen() -> None:
    kept = Explanations(ChunkHistory(Clock(), ["disk"]))
    kept.keep(answered((1, 95)))

    assert "window group 1 has no chunk" in str(kept.of("request"))
    assert "never stored here, or long ago" in str(kept.of("request"))


def test_a_chunk_that_failed_says_so() -> None:
    kept = Explanations(ChunkHistory(Clock(), []))
    kept.keep(answered((0, 0), lookup=ChunkLookup.FAILED))

    assert "(failed)" in str(kept.of("request"))


def test_nothing_is_said_about_a_complete_hit() -> None:
    kept = Explanations(ChunkHistory(Clock(), []))
    kept.keep(answered())

    assert len(str(kept.of("request")).splitlines()) == 1


def test_time_and_cost() -> None:
    kept = Explanations(ChunkHistory(Clock(), []))
    kept.keep(answered(verdict=Verdict(9.96, ran_out_of_time=True, was_too_slow=True)))
    lines = str(kept.of("request")).splitlines()

    assert lines[1].strip() == "nothing was loaded: computing was expected to be faster"
    assert lines[2].strip() == "the deadline passed after 10.0 s"


def test_a_request_without_an_answer_has_no_explanation() -> None:
    kept = Explanations(ChunkHistory(Clock(), []))
    kept.keep(a_request(GEOMETRY, 100))

    assert kept.of("request") is None


def test_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "MOST_KEPT", 3)
    kept = Explanations(ChunkHistory(Clock(), []))
    for number in (0, 1, 2, 0, 3):
        request = a_request(GEOMETRY, 100, name=str(number))
        request.plan, request.verdict = LoadPlan(0, 0, 0, 0, (), ()), PROMPTLY
        kept.keep(request)

    assert len(kept) == 3
    assert kept.of("1") is None
    assert kept.of("0") is not None


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_history, "MOST_REMEMBERED", 3)
    history = ChunkHistory(Clock(), ["disk"])
    keys = [ChunkKey(bytes([n]) * 34) for n in range(5)]
    for key in (*keys[:3], keys[0], *keys[3:]):
        history.left([key], in_no_tier)

    assert [history.tell(key).startswith("evicted") for key in keys] == [
        True,
        False,
        False,
        True,
        True,
    ]
