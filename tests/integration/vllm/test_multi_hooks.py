"""The hooks of a multi connector, with fakes for children and no engine."""

from __future__ import annotations

import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")  # with its warnings

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from kvstrata.engines.several.guard import GuardedChild
from kvstrata.engines.several.loads import Load, Orders
from kvstrata.engines.several.settings import ChildSettings
from kvstrata.engines.vllm.multi_connector import KVStrataMultiConnector
from kvstrata.engines.vllm.multi_groups import GroupFacts
from kvstrata.engines.vllm.multi_messages import (
    MultiHandshake,
    MultiMetadata,
    MultiReport,
)
from kvstrata.errors import ConfigError

from . import odd_connectors

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = GroupFacts(("FullAttentionSpec",), True, False, 16, (0,))  # noqa: FBT003
HYBRID = GroupFacts(("MambaSpec", "FullAttentionSpec"), False, True, 16, (0, 1))  # noqa: FBT003
NO_RESULTS = KVConnectorTransferResults()


class Fake(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM's classes are unknown
    """Notes what it is told, and says what it is told to say."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("answers", "calls", "told"):
            return super().__getattribute__(name)

        def hook(*args: Any, **_: Any) -> Any:
            self.calls.append((name, *args))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return hook

    def told(self, hook: str) -> list[Any]:
        return [args for name, *args in self.calls if name == hook]


Fake.__abstractmethods__ = frozenset()


class Meta(KVConnectorWorkerMetadata):  # type: ignore[misc] # the same
    """Ranks that reported."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def aggregate(self, other: Any) -> Meta:
        return Meta(*self.ranks, *other.ranks)


class Events:
    """Like vLLM's containers of events."""

    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[str]) -> None:
        self.events += events

    def get_all_events(self) -> list[str]:
        return self.events

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_number_of_workers(self) -> int:
        return self.workers


def beside_a_rank(groups: GroupFacts = PLAIN, **children: Fake) -> Any:
    made = object.__new__(KVStrataMultiConnector)
    for child in children.values():
        child.answers.setdefault("get_transfer_results", NO_RESULTS)
    made._role = KVConnectorRole.WORKER
    made._open_worker(children, groups)
    return made


def beside_the_scheduler(groups: GroupFacts = PLAIN, **children: Fake) -> Any:
    made = object.__new__(KVStrataMultiConnector)
    made._role = KVConnectorRole.SCHEDULER
    made._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    guarded = [
        GuardedChild(ChildSettings("", name, 1.0, 1.0, {}), child)
        for name, child in children.items()
    ]
    made._open_scheduler(guarded, groups)
    return made


def a_request(name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, num_tokens=65)


def blocks(*tables: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: tables)


# --- beside a rank ----------------------------------------------------------------------------


def test_each_child_hears_of_preemptions_in_its_own_form() -> None:
    a, b = Fake(), Fake()
    multi = beside_a_rank(a=a, b=b)
    multi.handle_preemptions(MultiMetadata({"a": "of a", "b": "of b"}))
    assert (a.told("handle_preemptions"), b.told("handle_preemptions")) == ([["of a"]], [["of b"]])
    multi.handle_preemptions({"r"})
    assert a.told("handle_preemptions")[1:] == b.told("handle_preemptions")[1:] == [[{"r"}]]


def test_only_children_with_metadata_take_part_in_a_step() -> None:
    a, b = Fake(), Fake()
    multi = beside_a_rank(a=a, b=b)
    multi.bind_connector_metadata(MultiMetadata({"a": "of a"}))
    multi.start_load_kv(None)
    multi.wait_for_save()
    multi.clear_connector_metadata()
    multi.wait_for_save()
    assert [name for name, *_ in a.calls] == [
        "bind_connector_metadata", "start_load_kv", "wait_for_save", "clear_connector_metadata",
    ]  # fmt: skip
    assert b.calls == []


def test_a_load_of_a_stopped_child_is_reported_by_its_rank_and_then_it_is_closed() -> None:
    a = Fake()
    multi = beside_a_rank(a=a)
    orders = Orders({"r": Load("a", 16, frozenset({1}))})
    multi.bind_connector_metadata(MultiMetadata({"a": "of a"}, orders))
    assert multi.get_transfer_results(set()) == NO_RESULTS
    multi.handle_preemptions(MultiMetadata({}, stopped=("a",)))
    multi.bind_connector_metadata(MultiMetadata({}, stopped=("a",)))
    assert not a.told("shutdown")
    a.answers["get_transfer_results"] = KVConnectorTransferResults(finished_recving={"r"})
    assert multi.get_transfer_results(set()).finished_recving == {"r"}
    multi.handle_preemptions(MultiMetadata({}, stopped=("a",)))
    assert len(a.told("shutdown")) == 1


def test_bad_blocks_of_hybrid_models_become_failed_requests() -> None:
    a = Fake(get_block_ids_with_load_errors={5})
    multi = beside_a_rank(HYBRID, a=a)
    orders = Orders({"r": Load("a", 16, frozenset({4, 5})), "s": Load("a", 16, frozenset({6}))})
    multi.bind_connector_metadata(MultiMetadata({"a": "of a"}, orders))
    a.answers["get_transfer_results"] = KVConnectorTransferResults(finished_recving={"r", "s"})
    results = multi.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r", "s"}, {"r"})
    assert multi.get_block_ids_with_load_errors() == set()


def test_bad_blocks_of_plain_models_are_passed_on() -> None:
    multi = beside_a_rank(a=Fake(get_block_ids_with_load_errors={5}), b=Fake())
    assert multi.get_block_ids_with_load_errors() == {5}


def test_a_rank_says_what_its_children_say() -> None:
    a = Fake(build_connector_worker_meta=Meta(0), get_kv_connector_kv_cache_events=Events("e"))
    b = Fake(wait_for_save=RuntimeError("on purpose"), shutdown=RuntimeError("too"))
    multi = beside_a_rank(a=a, b=b)
    assert multi.build_connector_worker_meta() is None
    multi.bind_connector_metadata(MultiMetadata({"a": "of a", "b": "of b"}))
    multi.wait_for_save()
    report = multi.build_connector_worker_meta()
    assert report.parts["a"].ranks == (0,)
    assert report.events["a"].events == ["e"]
    assert report.faults == {"b": "wait_for_save: RuntimeError('on purpose')"}
    assert report.unclean == {"b"}


def test_one_child_may_have_a_memory_pool() -> None:
    assert beside_a_rank(a=Fake(), b=Fake(get_mem_pool_context="p")).get_mem_pool_context() == "p"
    both = beside_a_rank(a=Fake(get_mem_pool_context="p"), b=Fake(get_mem_pool_context="q"))
    with pytest.raises(ConfigError, match="a, b want a memory pool"):
        both.get_mem_pool_context()


# --- beside the scheduler ---------------------------------------------------------------------


def test_groups_are_the_winners_or_what_all_load() -> None:
    matched = "get_num_new_matched_tokens"
    a = Fake(get_loaded_kv_cache_group_ids=(0, 1), **{matched: (0, False)})
    b = Fake(get_loaded_kv_cache_group_ids=(1,), **{matched: (32, True)})
    multi = beside_the_scheduler(HYBRID, a=a, b=b)
    assert multi.get_loaded_kv_cache_group_ids(a_request()) == (1,)
    a.answers[matched] = (48, True)
    assert multi.get_num_new_matched_tokens(a_request(), 16) == (48, True)
    assert multi.get_loaded_kv_cache_group_ids(a_request()) == (0, 1)


def test_the_winner_gets_what_vllm_says_and_others_nothing() -> None:
    a = Fake(get_num_new_matched_tokens=(48, True))
    b = Fake(get_num_new_matched_tokens=(32, True))
    multi = beside_the_scheduler(a=a, b=b)
    multi.get_num_new_matched_tokens(a_request(), 0)
    multi.update_state_after_alloc(request := a_request(), table := blocks([0, 1, 2]), 32)
    assert a.told("update_state_after_alloc") == [[request, table, 32]]
    assert b.told("update_state_after_alloc") == [[request, table, 0]]


def test_each_child_hears_of_its_own_work() -> None:
    a = Fake(get_num_new_matched_tokens=(48, True), build_connector_meta="of a")
    b = Fake(
        get_num_new_matched_tokens=(0, False),
        build_connector_meta="of b",
        request_finished_all_groups=(True, {"k": 1}),
    )
    a.answers["request_finished_all_groups"] = (False, None)
    multi = beside_the_scheduler(a=a, b=b)
    multi.get_num_new_matched_tokens(a_request(), 0)
    multi.update_state_after_alloc(a_request(), blocks([0, 1, 2]), 48)
    assert multi.request_finished_all_groups(a_request("s"), ([1],)) == (True, {"k": 1})
    metadata = pickle.loads(pickle.dumps(multi.build_connector_meta(None)))  # noqa: S301 - our own
    assert metadata.parts == {"a": "of a", "b": "of b"}
    assert metadata.orders.started == {"r": Load("a", 48, frozenset({1, 2}))}
    assert metadata.savers == {"s": ["b"]}
    report = MultiReport({"a": Meta(0)}, strays=Counter({"b": 2}))
    multi.update_connector_output(
        KVConnectorOutput(
            finished_sending={"s"},
            finished_recving={"r"},
            failed_recving={"r"},
            kv_connector_worker_meta=report,
        )
    )
    [[of_a]] = a.told("update_connector_output")
    [[of_b]] = b.told("update_connector_output")
    assert (of_a.finished_recving, of_a.failed_recving, of_a.finished_sending) == (
        {"r"}, {"r"}, set(),
    )  # fmt: skip
    assert (of_b.finished_recving, of_b.failed_recving, of_b.finished_sending) == (
        set(), set(), {"s"},
    )  # fmt: skip
    assert of_a.kv_connector_worker_meta.ranks == (0,)
    assert of_b.kv_connector_worker_meta is None
    stats = multi.child_stats()
    assert (stats["a"].failed_loads, stats["a"].pending_loads) == (1, 0)
    assert stats["b"].stray_reports == 2


def test_a_request_that_ends_during_its_load_is_not_held_twice() -> None:
    a = Fake(
        get_num_new_matched_tokens=(48, True),
        request_finished_all_groups=(True, None),
        register_finished_partial_tail=True,
    )
    multi = beside_the_scheduler(a=a)
    multi.get_num_new_matched_tokens(a_request(), 0)
    multi.update_state_after_alloc(a_request(), blocks([1]), 48)
    assert multi.register_finished_partial_tail(a_request(), ([1],), []) is False
    assert multi.request_finished_all_groups(a_request(), ([1],)) == (False, None)


def test_who_takes_the_end_of_a_request_saves_it() -> None:
    a = Fake(register_finished_partial_tail=True, request_finished_all_groups=(False, None))
    b = Fake(register_finished_partial_tail=False, request_finished_all_groups=(True, None))
    multi = beside_the_scheduler(a=a, b=b)
    assert multi.register_finished_partial_tail(a_request(), ([1],), [])
    assert multi.request_finished_all_groups(a_request(), ([1],))[0]
    assert multi.build_connector_meta(None).savers == {"r": ["a", "b"]}


def test_the_first_child_wins_where_transfer_parameters_clash() -> None:
    a = Fake(request_finished_all_groups=(False, {"k": 1}))
    b = Fake(request_finished_all_groups=(False, {"k": 2, "l": 3}))
    multi = beside_the_scheduler(a=a, b=b)
    assert multi.request_finished_all_groups(a_request(), ([],)) == (False, {"k": 1, "l": 3})


def test_blocks_that_an_unclean_child_may_write_to_are_held() -> None:
    a = Fake(get_num_new_matched_tokens=(48, True), build_connector_meta="of a")
    multi = beside_the_scheduler(a=a)
    held: list[str] = []
    pool = SimpleNamespace(blocks=["null", "one", "two"], touch=held.extend)
    multi.bind_gpu_block_pool(pool)
    multi.get_num_new_matched_tokens(a_request(), 0)
    multi.update_state_after_alloc(a_request(), blocks([0, 1, 2]), 48)
    multi.build_connector_meta(None)
    multi.update_connector_output(
        KVConnectorOutput(
            finished_recving={"r"},
            failed_recving={"r"},
            kv_connector_worker_meta=MultiReport(faults={"a": "x"}, unclean=frozenset({"a"})),
        )
    )
    assert held == ["one", "two"]
    assert multi.child_stats()["a"].is_stopped


def test_children_report_on_every_rank_or_not_at_all() -> None:
    assert beside_the_scheduler(a=Fake(), b=Fake(get_finished_count=2)).get_finished_count() is None
    with pytest.raises(ConfigError, match="a reports requests on 1 of 2 ranks"):
        beside_the_scheduler(a=Fake(get_finished_count=1)).get_finished_count()


def test_a_reset_is_refused_by_children_in_use_alone() -> None:
    a, b = Fake(reset_cache=None), Fake(reset_cache=RuntimeError("on purpose"))
    multi = beside_the_scheduler(a=a, b=b)
    assert multi.reset_cache()
    a.answers["reset_cache"] = False
    assert not multi.reset_cache()


def test_handshakes_are_kept_apart() -> None:
    rank = beside_a_rank(a=Fake(get_handshake_metadata="of a"), b=Fake())
    said = rank.get_handshake_metadata()
    assert said == MultiHandshake({"a": "of a"})
    assert beside_a_rank(b=Fake()).get_handshake_metadata() is None
    a, b = Fake(), Fake()
    multi = beside_the_scheduler(a=a, b=b)
    multi.set_xfer_handshake_metadata_pp_aware({(0, 1): said})
    assert a.told("set_xfer_handshake_metadata_pp_aware") == [[{(0, 1): "of a"}]]
    assert b.calls == []


# --- messages and classes ---------------------------------------------------------------------


def test_reports_add_up_in_any_grouping() -> None:
    def reports() -> list[MultiReport]:
        return [
            MultiReport({"a": Meta(0)}, {"a": Events("x")}, {"b": "first"}, frozenset({"b"})),
            MultiReport({"b": Meta(1)}, {}, {"b": "second"}, strays=Counter(a=1)),
            MultiReport({"a": Meta(2), "b": Meta(2)}, {"a": Events("y")}, strays=Counter(a=2)),
        ]

    def facts(report: MultiReport) -> Any:
        events = {name: (e.events, e.workers) for name, e in report.events.items()}
        parts = {name: part.ranks for name, part in report.parts.items()}
        return parts, events, report.faults, report.unclean, report.strays

    a, b, c = reports()
    d, e, f = reports()
    left, right = a.aggregate(b).aggregate(c), d.aggregate(e.aggregate(f))
    assert facts(left) == facts(right) == (
        {"a": (0, 2), "b": (1, 2)}, {"a": (["x", "y"], 2)}, {"b": "first"}, {"b"}, {"a": 3},
    )  # fmt: skip


def a_config(*kinds: type[Any], **settings: Any) -> Any:
    children = [
        {
            "kv_connector": kind.__name__,
            "kv_connector_module_path": kind.__module__,
            "kv_connector_extra_config": settings,
        }
        for kind in kinds
    ]
    transfer = KVTransferConfig(
        kv_connector="KVStrataMultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    return SimpleNamespace(kv_transfer_config=transfer)


def test_children_agree_about_the_layout() -> None:
    heads, tokens, late = (
        odd_connectors.HeadsFirst, odd_connectors.TokensFirst, odd_connectors.LateConnector,
    )  # fmt: skip
    layout = KVStrataMultiConnector.get_required_kvcache_layout
    assert layout(a_config(heads, late)) == "HND"
    assert layout(a_config(late)) is None
    with pytest.raises(ConfigError, match=r"HeadsFirst.*HND.*TokensFirst.*NHD"):
        layout(a_config(heads, tokens))


@pytest.mark.parametrize("is_layerwise", [True, False])
def test_one_child_that_works_by_layers_is_enough(is_layerwise: bool) -> None:  # noqa: FBT001
    kinds = odd_connectors.LateConnector, odd_connectors.HeadsFirst
    transfer = a_config(*kinds, layerwise=is_layerwise).kv_transfer_config
    needs = KVStrataMultiConnector.requires_piecewise_for_cudagraph
    assert needs(transfer.kv_connector_extra_config) is is_layerwise


def test_a_multi_connector_is_no_child() -> None:
    with pytest.raises(ConfigError, match="made of several itself"):
        KVStrataMultiConnector.get_required_kvcache_layout(a_config(KVStrataMultiConnector))
