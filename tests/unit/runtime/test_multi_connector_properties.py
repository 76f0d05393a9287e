from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.runtime.match_choice import Offer, best_offer, can_be_beaten
from kvstrata.runtime.seam import EndedLoads

from .fake_children import TABLES, FakeScheduler, FakeWorker, Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

answers = st.sampled_from([None, 0, 16, 32, 48, 64])
weights = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])
all_offers = st.lists(st.builds(Offer, answers, weights), min_size=1, max_size=5).map(
    lambda offers: [offer._replace(is_awaited=offer.tokens is None) for offer in offers]
)


def _winner_by_the_rule(offers: Sequence[Offer]) -> int | None:
    scores = [(offer.tokens or 0) * offer.weight for offer in offers]
    return scores.index(max(scores)) if any(scores) else None


@given(all_offers)
def test_winner_is_as_the_rule_says(offers: list[Offer]) -> None:
    names = [str(place) for place in range(len(offers))]
    rig = Rig(
        {name: FakeScheduler(offer.tokens) for name, offer in zip(names, offers, strict=True)},
        weights={name: offer.weight for name, offer in zip(names, offers, strict=True)},
        deadlines=dict.fromkeys(names, 0.0),
    )
    rig.add()
    tokens = rig.admit()
    winner = _winner_by_the_rule(offers)
    assert best_offer(offers) == winner
    assert tokens == (0 if winner is None else offers[winner].tokens)
    loading = [place for place, name in enumerate(names) if rig.allocated_tokens(name) != [0]]
    assert loading == ([] if winner is None else [winner])


@given(all_offers)
def test_waiting_ends_exactly_when_no_answer_could_change_the_winner(offers: list[Offer]) -> None:
    best = best_offer(offers)
    changed = [
        _winner_by_the_rule([*offers[:place], offer._replace(tokens=64), *offers[place + 1 :]])
        for place, offer in enumerate(offers)
        if offer.is_awaited
    ]
    assert can_be_beaten(offers, best, 64) == any(winner != best for winner in changed)


HOOKS = ["match", "add_request", "allocated", "plan_step", "report", "finished", "has_pending_work"]
WORKER_HOOKS = ["register_caches", "start_step", "finish_step", "close"]


@st.composite
def _rigs(draw: st.DrawFn) -> Rig:
    names = [f"c{n}" for n in range(draw(st.integers(1, 4)))]
    faults = st.sets(st.sampled_from(HOOKS), max_size=1)
    worker_faults = st.sets(st.sampled_from(WORKER_HOOKS), max_size=2)
    said = st.lists(answers, max_size=6)
    return Rig(
        {n: FakeScheduler(*draw(said), raises=draw(faults)) for n in names},
        [
            {n: FakeWorker(draw(worker_faults)) for n in names}
            for _ in range(draw(st.integers(1, 2)))
        ],
        {n: draw(weights) for n in names},
        {n: draw(st.sampled_from([0.0, 1.0, 2.5])) for n in names},
    )


class SmallEngine:
    """Asks until it is told, waits for loads, and gives up on loading after three failures.

    A load that is reported twice, or though it was not asked for, is a KeyError here.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.waiting: dict[str, float] = {}
        """Since when they were told to ask again."""
        self.loading: dict[str, str] = {}
        """Who was asked."""
        self.ended: set[str] = set()
        self.failures: Counter[str] = Counter()
        self._longest_wait_s = sum(math.ceil(s) for s in rig.deadlines.values())  # one by one

    def add(self, request_id: str) -> None:
        self.rig.add(request_id)
        self.waiting[request_id] = math.inf

    def abort(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self._finish(request_id)

    def schedule(self) -> None:
        for request_id, since in list(self.waiting.items()):
            for half in self.rig.schedulers.values():
                half.calls.clear()
            tokens = self._admit(request_id)
            if tokens is None:
                self.waiting[request_id] = min(since, self.rig.now)
                assert self.rig.now - self.waiting[request_id] < self._longest_wait_s
                continue
            del self.waiting[request_id]
            if tokens:
                self.loading[request_id] = self._loader()
            else:
                self._finish(request_id)

    def update(self) -> None:
        ended = self.rig.step()
        assert not ended.done & ended.failed
        for request_id in ended.done | ended.failed:
            del self.loading[request_id]
            if request_id in self.ended:
                continue
            if request_id in ended.done:
                self._finish(request_id)
            else:
                self.failures[request_id] += 1
                self.waiting[request_id] = math.inf
        self.rig.now += 1.0

    def _admit(self, request_id: str) -> int | None:
        if self.failures[request_id] < 3:
            return self.rig.admit(request_id)
        self.rig.multi.allocated(request_id, TABLES, 0)
        return 0

    def _loader(self) -> str:
        """The one child that has just been told to load; none if it has just been stopped."""
        loaders = [
            name
            for name, half in self.rig.schedulers.items()
            if any(tokens for *_, tokens in half.named("allocated"))
        ]
        assert len(loaders) <= 1
        return loaders[0] if loaders else "nobody"

    def _finish(self, request_id: str) -> None:
        if request_id not in self.ended:
            self.ended.add(request_id)
            self.rig.multi.finished(request_id)


def _claim(engine: SmallEngine, claims: Callable[[str, str], bool | None]) -> None:
    """Let children report: True for done, False for failed, None for nothing."""
    for name, half in engine.rig.schedulers.items():
        said = {request_id: claims(name, request_id) for request_id in engine.loading}
        half.ended = EndedLoads(
            frozenset(r for r, is_done in said.items() if is_done),
            frozenset(r for r, is_done in said.items() if is_done is False),
        )


@given(st.data())
def test_every_request_ends_and_every_load_is_reported_once(data: st.DataObject) -> None:
    rig = data.draw(_rigs())
    engine = SmallEngine(rig)
    for number in range(data.draw(st.integers(1, 5))):
        engine.add(f"r{number}")
        engine.schedule()
        if data.draw(st.booleans()):
            engine.abort(f"r{data.draw(st.integers(0, number))}")
        _claim(engine, lambda *_: data.draw(st.sampled_from([None, True, False])))
        engine.update()
    for _ in range(30):  # from now on, everybody reports what it was asked for
        engine.schedule()
        _claim(engine, lambda name, request_id: name == engine.loading[request_id] or None)
        engine.update()
    assert not engine.waiting
    assert not engine.loading
    assert not rig.multi.has_pending_work
    rig.multi.check_invariants()
    for stats in rig.multi.stats().values():
        assert stats.pending_loads == 0
        assert stats.faults or not stats.is_stopped
