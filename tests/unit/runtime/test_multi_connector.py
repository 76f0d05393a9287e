from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from kvstrata.core.hashing import PrefixHasher
from kvstrata.errors import ConfigError
from kvstrata.runtime.multi_child import MOST_FORGIVEN
from kvstrata.runtime.multi_connector import Child, MultiScheduler, MultiWorker, preempted_ids
from kvstrata.runtime.multi_messages import MultiMessage, MultiReport
from kvstrata.runtime.seam import EndedLoads, Match, NewRequest, RequestProgress, StepProgress
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group
from kvstrata.testing.memory_connector import MemoryScheduler, MemoryWorker

from .fake_children import EMPTY, LAYOUT, TABLES, FakeContext, FakeScheduler, FakeWorker, Rig

if TYPE_CHECKING:
    from kvstrata.core.layout import KVLayout

# --- who wins ---------------------------------------------------------------------------------


def test_child_with_most_weighed_tokens_loads_and_others_hear_of_the_blocks() -> None:
    rig = Rig({"a": FakeScheduler(48), "b": FakeScheduler(32)}, weights={"b": 2.0})
    rig.add()
    assert rig.admit() == 32
    assert rig.schedulers["b"].named("allocated") == [("r", TABLES, 32)]
    assert rig.schedulers["a"].named("allocated") == [("r", TABLES, 0)]


def test_first_child_wins_among_equals() -> None:
    rig = Rig({"a": FakeScheduler(32), "b": FakeScheduler(32)})
    rig.add()
    rig.admit()
    assert (rig.allocated_tokens("a"), rig.allocated_tokens("b")) == ([32], [0])


def test_winner_whose_answer_is_dropped_is_forgotten() -> None:
    rig = Rig({"a": FakeScheduler(32, 0), "b": FakeScheduler(16)})
    rig.add()
    assert rig.multi.match("r", 0) == Match(32)
    assert rig.admit() == 16
    assert (rig.allocated_tokens("a"), rig.allocated_tokens("b")) == ([0], [16])


def test_allocation_without_external_tokens_starts_no_load() -> None:
    rig = Rig({"a": FakeScheduler(32)})
    rig.add()
    rig.multi.match("r", 0)
    rig.multi.allocated("r", TABLES, 0)
    assert rig.allocated_tokens("a") == [0]
    assert rig.multi.stats()["a"].loads == 0
    assert rig.step() == EndedLoads()


def test_load_that_nobody_promised_fails_instead_of_waiting() -> None:
    rig = Rig({"a": FakeScheduler(0)})
    rig.add()
    rig.multi.match("r", 0)
    rig.multi.allocated("r", TABLES, 32)
    assert rig.multi.has_pending_work
    assert rig.step() == EndedLoads(failed=frozenset({"r"}))


@pytest.mark.parametrize("tokens", [-16, 8, 80, 1000])
def test_answer_that_no_request_could_go_on_from_is_a_miss(tokens: int) -> None:
    rig = Rig({"a": FakeScheduler(tokens), "b": FakeScheduler(16)})
    rig.add(num_tokens=65)
    assert rig.admit() == 16
    assert rig.multi.stats()["a"].unusable_answers == 1
    assert rig.multi.stats()["a"].misses == 1


def test_unknown_request_matches_nothing_and_ended_ones_are_unknown() -> None:
    rig = Rig({"a": FakeScheduler(32)})
    assert rig.multi.match("r", 0) == Match(0)
    rig.add()
    assert rig.multi.match("r", 0) == Match(32)
    rig.multi.finished("r")
    assert rig.multi.match("r", 0) == Match(0)


def test_winner_is_forgotten_when_the_answer_is_to_ask_again() -> None:
    rig = Rig({"a": FakeScheduler(0, None), "b": FakeScheduler(16)})
    rig.add()
    assert rig.multi.match("r", 0) == Match(16)
    assert rig.multi.match("r", 0) is None
    rig.multi.allocated("r", TABLES, 16)
    assert rig.allocated_tokens("b") == [0]


# --- undecided children -----------------------------------------------------------------------


def test_undecided_child_delays_until_its_deadline_and_no_longer() -> None:
    rig = Rig({"slow": FakeScheduler(None), "b": FakeScheduler(16)}, deadlines={"slow": 2.0})
    rig.add()
    rig.now = 10.0
    assert rig.multi.match("r", 0) is None
    rig.now = 11.9
    assert rig.multi.match("r", 0) is None
    rig.now = 12.0
    assert rig.admit() == 16
    assert rig.multi.stats()["slow"].deadline_misses == 1
    assert rig.multi.stats()["slow"].undecided == 1


def test_child_that_decides_in_time_wins() -> None:
    rig = Rig({"slow": FakeScheduler(None, 48), "b": FakeScheduler(16)})
    rig.add()
    assert rig.admit() is None
    assert rig.admit() == 48
    assert rig.multi.stats()["slow"].deadline_misses == 0


def test_late_answer_still_counts_if_the_request_was_not_admitted() -> None:
    rig = Rig({"slow": FakeScheduler(None, None, 48), "b": FakeScheduler(16)})
    rig.add()
    assert rig.multi.match("r", 0) is None
    rig.now = 5.0
    assert rig.multi.match("r", 0) == Match(16)
    assert rig.admit() == 48


def test_child_that_changes_its_mind_gets_no_new_deadline() -> None:
    rig = Rig({"slow": FakeScheduler(None, 0, None), "b": FakeScheduler(16)})
    rig.add()
    assert rig.multi.match("r", 0) is None
    rig.now = 0.9
    assert rig.multi.match("r", 0) == Match(16)
    rig.now = 1.0
    assert rig.multi.match("r", 0) == Match(16)


def test_nobody_waits_for_a_child_that_cannot_win() -> None:
    rig = Rig({"a": FakeScheduler(64), "slow": FakeScheduler(None)})
    rig.add(num_tokens=65)
    assert rig.admit() == 64
    assert rig.multi.stats()["slow"].undecided == 1


def test_first_child_that_could_win_a_tie_is_waited_for() -> None:
    rig = Rig({"slow": FakeScheduler(None), "b": FakeScheduler(64)})
    rig.add(num_tokens=65)
    assert rig.admit() is None


def test_prompt_too_short_for_any_hit_waits_for_nobody() -> None:
    rig = Rig({"slow": FakeScheduler(None)})
    rig.add(num_tokens=16)
    assert rig.admit() == 0


def test_new_round_has_a_new_deadline() -> None:
    rig = Rig({"slow": FakeScheduler(None)})
    rig.add()
    rig.admit()
    rig.now = 1.0
    assert rig.admit() == 0
    assert rig.admit() is None
    rig.now = 2.0
    assert rig.admit() == 0
    assert rig.multi.stats()["slow"].deadline_misses == 2


# --- loads ------------------------------------------------------------------------------------


def test_only_the_winner_may_report_a_load() -> None:
    rig = Rig({"a": FakeScheduler(32), "b": FakeScheduler(16)})
    rig.add()
    rig.admit()
    rig.schedulers["b"].ended = EndedLoads(frozenset({"r"}), frozenset({"ghost"}))
    assert rig.step() == EndedLoads()
    rig.schedulers["a"].ended = EndedLoads(frozenset({"r"}))
    assert rig.step() == EndedLoads(frozenset({"r"}))
    rig.schedulers["a"].ended = EndedLoads(frozenset({"r"}))
    assert rig.step() == EndedLoads()
    stats = rig.multi.stats()
    assert (stats["a"].stray_reports, stats["b"].stray_reports) == (1, 2)
    assert (stats["a"].loads, stats["a"].loaded_tokens, stats["a"].pending_loads) == (1, 32, 0)


def test_load_that_is_done_and_failed_has_failed() -> None:
    rig = Rig({"a": FakeScheduler(32)})
    rig.add()
    rig.admit()
    rig.schedulers["a"].ended = EndedLoads(frozenset({"r"}), frozenset({"r"}))
    assert rig.step() == EndedLoads(failed=frozenset({"r"}))
    assert rig.multi.stats()["a"].failed_loads == 1
    assert rig.multi.stats()["a"].stray_reports == 0


def test_load_of_an_aborted_request_is_still_reported() -> None:
    rig = Rig({"a": FakeScheduler(32)})
    rig.add()
    rig.admit()
    rig.multi.finished("r")
    assert rig.multi.stats()["a"].pending_loads == 1
    rig.schedulers["a"].ended = EndedLoads(frozenset({"r"}))
    assert rig.step() == EndedLoads(frozenset({"r"}))
    assert not rig.multi.has_pending_work


def test_child_that_never_reports_its_load_is_stopped() -> None:
    rig = Rig({"a": FakeScheduler(32), "b": FakeScheduler(16)})
    rig.add()
    rig.add("s")
    rig.admit()
    rig.admit("s")
    rig.now = 300.0
    assert rig.step() == EndedLoads()
    rig.now = 300.1
    assert rig.step() == EndedLoads(failed=frozenset({"r", "s"}))
    assert rig.multi.stats()["a"].is_stopped
    assert rig.admit() == 16


# --- faults -----------------------------------------------------------------------------------

TOLD = ["add_request", "allocated", "plan_step", "report", "finished", "bind_scheduler_context"]


@pytest.mark.parametrize("hook", TOLD)
def test_child_that_raises_when_told_something_is_stopped_everywhere(hook: str) -> None:
    bad, good = FakeScheduler(48, raises=[hook]), FakeScheduler(16)
    workers = [{"bad": FakeWorker(), "good": FakeWorker()} for _ in range(2)]
    rig = Rig({"bad": bad, "good": good}, workers)
    rig.add()
    rig.admit()
    rig.step()
    rig.multi.finished("r")
    good.ended = EndedLoads(frozenset({"r"}))
    rig.step()
    assert rig.multi.stats()["bad"].is_stopped
    assert rig.multi.stats()["bad"].faults == 1
    assert all(rank["bad"].calls[-1] == "close" for rank in workers)
    assert not rig.multi.has_pending_work
    calls = len(bad.calls)
    rig.add("s")
    assert rig.admit("s") == 16
    rig.step()
    assert len(bad.calls) == calls
    assert rig.multi.stats()["good"].faults == 0


@pytest.mark.parametrize(("hook", "steps"), [("allocated", 1), ("plan_step", 1), ("report", 2)])
def test_load_of_a_child_that_raises_fails_once(hook: str, steps: int) -> None:
    rig = Rig({"bad": FakeScheduler(48, raises=[hook]), "good": FakeScheduler(16)})
    rig.add()
    assert rig.admit() == 48
    ended = [rig.step() for _ in range(steps + 2)]
    assert ended.index(EndedLoads(failed=frozenset({"r"}))) == steps - 1
    assert sum(len(e.failed) + len(e.done) for e in ended) == 1
    assert rig.multi.stats()["bad"].failed_loads == 1
    assert rig.admit() == 16


def test_load_fails_only_when_every_rank_has_stopped_the_child() -> None:
    workers = [{"bad": FakeWorker()}, {"bad": FakeWorker()}]
    rig = Rig({"bad": FakeScheduler(48, raises=["plan_step"])}, workers)
    rig.add()
    rig.admit()
    message = rig.multi.plan_step(EMPTY)
    assert msgspec.msgpack.decode(message, type=MultiMessage).stopping == ["bad"]
    first, second = rig.ranks
    first.start_step(message)
    silent = msgspec.msgpack.encode(MultiReport())
    assert rig.multi.report([first.finish_step(), silent]) == EndedLoads()
    assert rig.multi.report([first.finish_step(), b""]) == EndedLoads()
    assert rig.multi.report([]) == EndedLoads()
    second.start_step(message)
    reports = [first.finish_step(), second.finish_step()]
    assert rig.multi.report(reports).failed == {"r"}


def test_worker_half_that_raises_fails_its_load_on_every_rank() -> None:
    workers = [{"bad": FakeWorker(), "good": FakeWorker()} for _ in range(2)]
    workers[1]["bad"].raises = {"start_step"}
    rig = Rig({"bad": FakeScheduler(48), "good": FakeScheduler(16)}, workers)
    rig.add()
    rig.admit()
    assert rig.step() == EndedLoads()
    assert rig.multi.has_pending_work
    assert rig.step() == EndedLoads(failed=frozenset({"r"}))
    assert rig.schedulers["bad"].named("report") == []
    assert len(rig.schedulers["good"].named("report")) == 2
    assert [rank["bad"].calls.count("close") for rank in workers] == [1, 1]


@pytest.mark.parametrize("hook", ["register_caches", "start_step", "finish_step"])
def test_worker_half_that_raises_is_reported_and_left_alone(hook: str) -> None:
    workers = [{"bad": FakeWorker([hook]), "good": FakeWorker()}]
    rig = Rig({"bad": FakeScheduler(48), "good": FakeScheduler(16)}, workers)
    rig.step()
    rig.step()
    bad, good = workers[0]["bad"], workers[0]["good"]
    assert bad.calls[-2:] == [hook, "close"]
    assert good.calls == ["register_caches", *["start_step", "finish_step"] * 2]
    assert rig.multi.stats()["bad"].faults == 1
    assert rig.multi.stats()["bad"].is_stopped


def test_child_without_a_worker_half_is_stopped() -> None:
    rig = Rig({"a": FakeScheduler(48), "b": FakeScheduler(16)}, [{"a": FakeWorker()}])
    rig.step()
    assert rig.multi.stats()["b"].is_stopped
    assert not rig.multi.stats()["a"].is_stopped


def test_child_that_is_stopped_lets_its_blocks_go_when_all_ranks_confirm() -> None:
    rig = Rig({"bad": FakeScheduler(raises=["report"])})
    rig.schedulers["bad"].context.touch(iter([4, 4, 5]))
    rig.step()
    assert rig.context.holds == Counter({4: 2, 5: 1})
    is_pending = [rig.multi.has_pending_work]
    rig.step()
    assert [*is_pending, rig.multi.has_pending_work] == [True, False]
    assert rig.context.holds.total() == 0


def test_blocks_that_a_rank_may_still_write_to_are_never_used_again() -> None:
    workers = [{"bad": FakeWorker(["start_step", "close"])}]
    rig = Rig({"bad": FakeScheduler(48)}, workers)
    rig.schedulers["bad"].context.touch([5])
    rig.add()
    rig.admit()
    assert rig.step() == EndedLoads(failed=frozenset({"r"}))
    assert rig.context.holds == Counter({1: 1, 2: 1, 3: 1, 5: 1})


def test_child_cannot_let_go_of_blocks_of_others() -> None:
    rig = Rig({"a": FakeScheduler(), "b": FakeScheduler()})
    rig.schedulers["a"].context.touch([4])
    with pytest.raises(Exception, match="block 4 is let go 1 times, but held 0"):
        rig.schedulers["b"].context.free_blocks([4])
    rig.schedulers["a"].context.free_blocks([4])
    assert rig.context.holds.total() == 0


def test_question_that_raises_is_forgiven_a_few_times() -> None:
    rig = Rig({"bad": FakeScheduler(48, raises=["match"]), "good": FakeScheduler(16)})
    rig.add()
    for _ in range(MOST_FORGIVEN):
        assert rig.multi.match("r", 0) == Match(16)
    assert not rig.multi.stats()["bad"].is_stopped
    assert rig.admit() == 16
    assert rig.multi.stats()["bad"].is_stopped


def test_answers_of_the_wrong_type_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = FakeScheduler()
    for hook in ("match", "plan_step"):
        monkeypatch.setattr(bad, hook, lambda *_: SimpleNamespace())
    rig = Rig({"bad": bad, "good": FakeScheduler(16)})
    rig.add()
    assert rig.admit() == 16
    rig.step()
    assert rig.multi.stats()["bad"].faults == 2


def test_child_that_raises_everywhere_is_logged_once_or_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig({"bad": FakeScheduler(raises=["match"])})
    rig.add()
    for _ in range(MOST_FORGIVEN + 3):
        rig.multi.match("r", 0)
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "connector bad",
        "connector bad is not used any more, because of a fault",
    ]


# --- what is combined -------------------------------------------------------------------------


def test_preemption_reaches_every_child() -> None:
    rig = Rig({"a": FakeScheduler(), "b": FakeScheduler()})
    rig.step(StepProgress((), ["r", "s"]))
    assert all(half.named("plan_step") == [(("r", "s"),)] for half in rig.schedulers.values())


def test_each_child_gets_its_own_part_of_every_rank() -> None:
    names = ("a", "b")
    rig = Rig(
        {n: FakeScheduler() for n in names}, [{n: FakeWorker() for n in names} for _ in range(3)]
    )
    rig.step()
    assert rig.schedulers["a"].named("report") == [((b"said",) * 3,)]


def test_reset_asks_all_and_fails_if_one_fails() -> None:
    rig = Rig({"a": FakeScheduler(), "b": FakeScheduler()})
    assert rig.multi.reset()
    rig.schedulers["a"].can_reset = False
    assert not rig.multi.reset()
    assert len(rig.schedulers["b"].named("reset")) == 2
    rig.schedulers["a"].can_reset = True
    rig.schedulers["b"].raises = {"reset"}
    assert not rig.multi.reset()


def test_reset_does_not_depend_on_a_stopped_child() -> None:
    rig = Rig({"a": FakeScheduler(), "b": FakeScheduler(raises=["plan_step", "reset"])})
    rig.step()
    assert rig.multi.reset()


def test_events_are_concatenated_and_pending_work_is_shared() -> None:
    rig = Rig({"a": FakeScheduler(), "b": FakeScheduler(), "c": FakeScheduler()})
    rig.schedulers["a"].events = [1, 2]
    rig.schedulers["b"].raises = {"take_events", "has_pending_work"}
    rig.schedulers["c"].events = [3]
    assert rig.multi.take_events() == [1, 2, 3]
    assert not rig.multi.has_pending_work
    rig.schedulers["c"].is_pending = True
    assert rig.multi.has_pending_work


def test_close_reaches_every_child_though_one_raises() -> None:
    workers = [{"a": FakeWorker(["close"]), "b": FakeWorker()}]
    rig = Rig({"a": FakeScheduler(raises=["close"]), "b": FakeScheduler()}, workers)
    for _ in range(2):
        rig.multi.close()
        rig.ranks[0].close()
    assert rig.schedulers["b"].named("close")
    assert workers[0]["b"].calls.count("close") == 1


# --- construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        a_layout(full_group(16), full_group(16)),
        a_layout(window_group(64)),
        a_layout(full_group(16), recurrent_group(16)),
    ],
)
def test_hybrid_layout_needs_children_that_support_it(layout: KVLayout) -> None:
    able = Child("able", FakeScheduler(), supports_hybrid_groups=True)
    with pytest.raises(ConfigError, match=r"connectors: b, c cannot keep hybrid groups"):
        MultiScheduler(
            [Child("b", FakeScheduler()), able, Child("c", FakeScheduler())], layout, lambda: 0.0
        )
    MultiScheduler([able], layout, lambda: 0.0)


def test_names_must_be_unique() -> None:
    with pytest.raises(ConfigError, match="names stand twice"):
        MultiScheduler(
            [Child("a", FakeScheduler()), Child("a", FakeScheduler())], LAYOUT, lambda: 0.0
        )
    with pytest.raises(ConfigError, match="names stand twice"):
        MultiWorker([("a", FakeWorker()), ("a", FakeWorker())])
    with pytest.raises(ConfigError, match="there is none"):
        MultiScheduler([], LAYOUT, lambda: 0.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weight_must_be_a_positive_number(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"connectors\.a\.load_weight"):
        Child("a", FakeScheduler(), load_weight=weight)


@pytest.mark.parametrize("deadline", [-1.0, math.nan, math.inf])
def test_deadline_must_be_a_time(deadline: float) -> None:
    with pytest.raises(ConfigError, match=r"connectors\.a\.match_deadline_s"):
        Child("a", FakeScheduler(), match_deadline_s=deadline)


@pytest.mark.parametrize(
    ("notice", "ids"),
    [
        ({"a", "b"}, {"a", "b"}),
        (["a"], {"a"}),
        ((), set()),
        (None, set()),
        (SimpleNamespace(preempted_req_ids={"a"}), {"a"}),
        (SimpleNamespace(preempted_req_ids=None), set()),
        (StepProgress((), ["a"]), {"a"}),
    ],
)
def test_preempted_ids_in_every_form(notice: object, ids: set[str]) -> None:
    assert preempted_ids(notice) == ids


@pytest.mark.parametrize("notice", ["a", 3, SimpleNamespace(other=["a"])])
def test_notice_of_another_form_is_refused(notice: object) -> None:
    with pytest.raises(TypeError, match="accepted: request ids"):
        preempted_ids(notice)


# --- two connectors of one class --------------------------------------------------------------


def test_two_memory_children_keep_the_same_blocks_apart() -> None:
    halves = {name: MemoryScheduler(LAYOUT) for name in ("a", "b")}
    workers = {name: MemoryWorker() for name in halves}
    context = FakeContext()
    context.tables = ((1, 2, 3, 4),)
    multi = MultiScheduler([Child(n, h) for n, h in halves.items()], LAYOUT, lambda: 0.0)
    multi.bind_scheduler_context(context)
    rank = MultiWorker(list(workers.items()))
    [layer] = LAYOUT.groups[0].layers
    cache = torch.randint(0, 255, (8, layer.page_bytes), dtype=torch.uint8)
    rank.register_caches(LAYOUT, {layer.name: cache}, 8)
    hasher = PrefixHasher(16)
    hasher.extend(range(49))
    multi.add_request(NewRequest("r", hasher.hashes, range(49), 49))

    def step(*running: RequestProgress) -> EndedLoads:
        rank.start_step(multi.plan_step(StepProgress(running)))
        return multi.report([rank.finish_step()])

    assert multi.match("r", 0) == Match(0)
    multi.allocated("r", context.tables, 0)
    step(RequestProgress("r", 49))
    assert workers["a"].payloads.keys() == workers["b"].payloads.keys()
    assert len(workers["a"].payloads) == 3
    assert context.holds.total() == 0

    halves["a"].behaviour.failing_loads = 1
    assert multi.match("r", 0) == Match(48)
    multi.allocated("r", ((5, 6, 7, 4),), 48)
    assert step() == EndedLoads(failed=frozenset({"r"}))
    halves["a"].reset()
    assert multi.match("r", 0) == Match(48)
    multi.allocated("r", ((5, 6, 7, 4),), 48)
    assert step() == EndedLoads(frozenset({"r"}))
    assert torch.equal(cache[5:8], cache[1:4])
    assert [multi.stats()[name].loads for name in halves] == [1, 1]
