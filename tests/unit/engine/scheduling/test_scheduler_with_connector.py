from __future__ import annotations

import pytest

from kvstrata.engine.scheduling.request import RequestState
from kvstrata.engine.scheduling.scheduler import MOST_FAILED_LOADS
from kvstrata.runtime.seam import EndedLoads
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group
from kvstrata.testing.memory_connector import Behaviour, MemoryScheduler

from .driver import Driver, ScriptedConnector

FULL = a_layout(full_group(4))
HYBRID = a_layout(full_group(4), window_group(3, 4), recurrent_group(8))


def test_a_load_is_waited_for_and_its_tokens_are_not_computed() -> None:
    connector = ScriptedConnector(r=8)
    driver = Driver(FULL, connector=connector)
    request = driver.send("r", 9)
    assert connector.added == ["r"]
    assert driver.step() == {}
    assert request.state is RequestState.LOADING
    assert connector.allocated_tokens == [("r", 8)]
    connector.ended = EndedLoads(frozenset({"r"}))
    driver.step()
    assert driver.step() == {"r": 9}
    assert request.external_hit_tokens == 8


def test_loaded_blocks_are_found_when_they_have_arrived() -> None:
    connector = ScriptedConnector(a=8)
    driver = Driver(FULL, connector=connector)
    driver.send("a", 9)
    driver.step()
    early = driver.send("b", 9, max_tokens=3)
    driver.step()
    assert early.local_hit_tokens == 0
    connector.ended = EndedLoads(frozenset({"a"}))
    driver.step()
    late = driver.send("c", 9)
    driver.finish()
    assert late.local_hit_tokens == 8


def test_a_load_goes_on_behind_a_local_hit() -> None:
    connector = ScriptedConnector(b=12)
    driver = Driver(FULL, connector=connector)
    driver.send("a", 9)
    driver.finish()
    request = driver.send("b", 13)
    driver.step()
    assert (request.local_hit_tokens, request.external_hit_tokens) == (8, 4)


@pytest.mark.parametrize(
    ("length", "loaded"), [(32, 0), (24, 0), (20, 0), (16, 16), (12, 0), (8, 8), (4, 0)]
)
def test_a_load_that_leaves_no_token_or_no_state_is_not_taken(length: int, loaded: int) -> None:
    connector = ScriptedConnector(r=length)
    driver = Driver(HYBRID, connector=connector)
    driver.send("r", 24)
    driver.step()
    assert connector.allocated_tokens == [("r", loaded)]


def test_a_load_may_end_inside_an_attention_block() -> None:
    connector = ScriptedConnector(r=6)
    layout = a_layout(full_group(4), window_group(3, 4), hash_block=2)
    driver = Driver(layout, connector=connector)
    request = driver.send("r", 9)
    driver.step()
    connector.ended = EndedLoads(frozenset({"r"}))
    driver.step()
    assert request.computed == 6
    names = [driver.pool.view(block).block_hash for block in request.tables[0].blocks]
    assert [name is not None for name in names] == [True, False]
    assert driver.step() == {"r": 9}


def test_an_undecided_connector_is_asked_again_while_others_go_ahead() -> None:
    connector = ScriptedConnector(a=None)
    driver = Driver(FULL, connector=connector)
    driver.send("a")
    driver.send("b")
    assert driver.step() == {"b": 5}
    connector.answers["a"] = 0
    assert driver.step() == {"a": 5}


def test_a_failed_load_is_tried_again_a_few_times_then_computed() -> None:
    connector = ScriptedConnector(r=8)
    driver = Driver(FULL, connector=connector)
    request = driver.send("r", 9)
    for _ in range(MOST_FAILED_LOADS):
        connector.ended = EndedLoads(failed=frozenset({"r"}))
        assert driver.step() == {}
        assert request.state is RequestState.WAITING
        assert driver.pool.num_free == 40
    assert driver.step() == {"r": 9}
    assert request.num_failed_loads == MOST_FAILED_LOADS
    assert request.external_hit_tokens == 0


def test_what_a_failed_load_left_is_not_found() -> None:
    connector = ScriptedConnector(a=8)
    driver = Driver(FULL, connector=connector)
    driver.send("a", 9)
    connector.ended = EndedLoads(failed=frozenset({"a"}))
    driver.step()
    driver.scheduler.abort("a")
    request = driver.send("b", 9)
    assert driver.finish() == [{"b": 9}]
    assert request.local_hit_tokens == 0


@pytest.mark.parametrize("names", ["abc", "cab"])
def test_loads_that_end_together_run_in_the_order_they_started(names: str) -> None:
    connector = ScriptedConnector(a=4, b=4, c=4)
    driver = Driver(FULL, connector=connector)
    for name in names:
        driver.send(name, 5, max_tokens=2)
    driver.step()
    connector.ended = EndedLoads(frozenset(names))
    driver.step()
    assert list(driver.step()) == list(names)


@pytest.mark.parametrize("names", ["abc", "cab"])
def test_loads_that_fail_together_wait_in_the_order_they_started(names: str) -> None:
    connector = ScriptedConnector(a=4, b=4, c=4)
    driver = Driver(FULL, connector=connector)
    for name in names:
        driver.send(name, 5)
    driver.send("d", 5)
    connector.ended = EndedLoads(failed=frozenset(names))
    driver.step()
    assert list(connector.context.waiting_requests()) == list(names)


def test_tokens_that_were_loaded_and_then_found_count_once() -> None:
    connector = ScriptedConnector(b=4)
    driver = Driver(FULL, 5, connector)
    driver.send("a", 8, max_tokens=6)
    driver.step()
    request = driver.send("b", range(50, 56), max_tokens=6)
    connector.ended = EndedLoads(frozenset({"b"}))
    driver.step()
    assert request.external_hit_tokens == 4
    driver.finish()
    assert request.num_preemptions == 1
    assert (request.local_hit_tokens, request.external_hit_tokens) == (4, 0)


def test_progress_names_what_a_step_makes_final() -> None:
    connector = ScriptedConnector()
    driver = Driver(HYBRID, connector=connector, max_step_tokens=8)
    request = driver.send("r", 20)
    step = driver.scheduler.schedule()
    [running] = connector.progress[-1].running
    assert (running.request_id, running.computed_tokens) == ("r", 8)
    [state] = running.offered_states
    assert (state.group_id, state.num_tokens) == (2, 8)
    assert state.block_id == request.tables[2].blocks[0]
    driver.compute(step)
    driver.step()
    driver.step()
    [running] = connector.progress[-1].running
    assert (running.computed_tokens, running.offered_states) == (20, ())


def test_a_finished_request_is_told_to_the_connector_once() -> None:
    connector = ScriptedConnector()
    driver = Driver(FULL, connector=connector)
    driver.send("r")
    driver.finish()
    driver.scheduler.abort("r")
    assert connector.finished_requests == ["r"]


def test_a_reset_that_the_connector_could_not_do_says_so() -> None:
    connector = ScriptedConnector()
    driver = Driver(FULL, connector=connector)
    connector.can_reset = False
    assert not driver.scheduler.reset_cache()


def test_requests_that_make_room_for_each_others_loads_still_end() -> None:
    """Both need nearly all blocks, and reload what they lost; loads are slow."""
    layout = a_layout(full_group(1), window_group(2, 8))
    behaviour = Behaviour()
    driver = Driver(layout, 24, MemoryScheduler(layout, behaviour), max_step_tokens=2)
    first, second = [7] * 9, [8] * 9
    driver.send("warm a", first)
    driver.send("warm b", second)
    driver.finish()
    driver.pool.forget_all()
    behaviour.load_steps = 11
    driver.send("a", first, max_tokens=8)
    for _ in range(12):
        driver.step()
    driver.send("b", [*second, 1, 2, 1, 2, 1, 2], max_tokens=2)
    driver.finish()


def test_a_connector_that_holds_blocks_delays_requests_only() -> None:
    behaviour = Behaviour(is_holding=True)
    connector = MemoryScheduler(FULL, behaviour)
    driver = Driver(FULL, 4, connector)
    requests = [driver.send(name, range(10 * i, 10 * i + 9)) for i, name in enumerate("abc")]
    for _ in range(20):
        driver.step()
    assert connector.num_held
    behaviour.is_holding = False
    driver.finish()
    assert all(len(request.output) == 1 for request in requests)
    assert driver.pool.num_free == 4
