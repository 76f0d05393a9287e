from __future__ import annotations

import pytest

from kvstrata.engine.scheduling.request import FinishReason, Request, RequestState
from kvstrata.engine.scheduling.scheduler import Scheduler
from kvstrata.engine.scheduling.step import SamplingParams
from kvstrata.errors import LayoutError, RequestError
from kvstrata.runtime.seam import EndedLoads
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

from .driver import Driver, ScriptedConnector

FULL = a_layout(full_group(4))
HYBRID = a_layout(full_group(4), window_group(3, 4), recurrent_group(8))


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "message"),
        [
            (0, 1, "it has no tokens; a prompt needs at least one"),
            (1, 0, "max_tokens is 0, but must be at least 1"),
            (1, -3, "max_tokens is -3, but must be at least 1"),
            (
                30,
                3,
                "30 prompt tokens and 3 for the answer, but max_request_tokens is 32: shorten it, or raise that",
            ),
            (
                20,
                5,
                "25 tokens may need 7 blocks, but the pool has 6: raise num_blocks to 8, or shorten it",
            ),
        ],
    )
    def test_what_could_never_run_is_refused(
        self, prompt: int, max_tokens: int, message: str
    ) -> None:
        driver = Driver(FULL, 6, max_request_tokens=32)
        with pytest.raises(RequestError) as error:
            driver.send("r", prompt, max_tokens=max_tokens)
        assert str(error.value) == f"request 'r': {message}"
        assert not driver.scheduler.has_work

    def test_the_longest_request_that_fits_is_served(self) -> None:
        driver = Driver(FULL, 6, max_request_tokens=24)
        request = driver.send("r", 20, max_tokens=4)
        driver.finish()
        assert len(request.output) == 4

    @pytest.mark.parametrize("num_blocks", [4, 5])
    def test_the_number_of_blocks_a_refusal_asks_for_is_enough(self, num_blocks: int) -> None:
        with pytest.raises(RequestError, match="raise num_blocks to 9,"):
            Driver(HYBRID, num_blocks).send("r", 9, max_tokens=1)
        driver = Driver(HYBRID, 9 - 1)
        driver.send("r", 9, max_tokens=1)
        driver.finish()

    def test_an_id_is_refused_while_it_is_in_use(self) -> None:
        driver = Driver(FULL)
        driver.send("r")
        with pytest.raises(RequestError, match="request 'r': this id is in use; take another"):
            driver.send("r")
        driver.finish()
        driver.send("r")

    def test_an_id_is_in_use_until_its_load_has_ended(self) -> None:
        connector = ScriptedConnector(r=4)
        driver = Driver(FULL, connector=connector)
        driver.send("r")
        driver.step()
        driver.scheduler.abort("r")
        with pytest.raises(RequestError, match="this id is in use"):
            driver.send("r")
        connector.ended = EndedLoads(frozenset({"r"}))
        driver.step()
        driver.send("r")

    def test_a_layout_with_states_inside_blocks_is_refused(self) -> None:
        layout = a_layout(full_group(16), recurrent_group(16, state_tokens=8))
        with pytest.raises(LayoutError, match=r"recurrent group 1: state_tokens is 8.*\(16\)"):
            Scheduler(layout, 10)

    def test_a_layout_with_states_at_ends_of_blocks_is_taken(self) -> None:
        Scheduler(a_layout(recurrent_group(16, state_tokens=16)), 10)


class TestSteps:
    def test_a_prompt_is_computed_and_its_answer_drawn_token_by_token(self) -> None:
        driver = Driver(FULL)
        request = driver.send("r", 6, max_tokens=3)
        assert driver.finish() == [{"r": 6}, {"r": 7}, {"r": 8}]
        assert request.output == [1, 1, 1]
        assert request.finish_reason is FinishReason.LENGTH
        assert driver.pool.num_free == 40

    def test_an_answer_ends_with_a_stop_token(self) -> None:
        driver = Driver(FULL)
        sampling = SamplingParams(max_tokens=9, stop_tokens=frozenset({1}))
        request = Request("r", [5], sampling, FULL)
        driver.scheduler.add(request)
        driver.finish()
        assert request.output == [1]
        assert request.finish_reason is FinishReason.STOP

    def test_a_step_computes_no_more_tokens_than_its_budget(self) -> None:
        driver = Driver(FULL, max_step_tokens=8)
        driver.send("a", 5, max_tokens=2)
        driver.send("b", 12, max_tokens=2)
        assert driver.finish() == [{"a": 5, "b": 3}, {"a": 6, "b": 10}, {"b": 12}, {"b": 13}]

    def test_a_request_draws_only_when_its_prompt_is_through(self) -> None:
        driver = Driver(FULL, max_step_tokens=4)
        driver.send("r", 6)
        first = driver.scheduler.schedule()
        assert first.plan.sequences[0].sampling is None
        assert driver.compute(first) == []
        second = driver.scheduler.schedule()
        assert second.plan.sequences[0].sampling is not None
        assert list(second.plan.sequences[0].token_ids) == [4, 5]

    def test_no_more_requests_hold_blocks_than_allowed(self) -> None:
        driver = Driver(FULL, max_running=2)
        for name in "abc":
            driver.send(name, 3, max_tokens=2)
        assert driver.finish() == [{"a": 3, "b": 3}, {"a": 4, "b": 4}, {"c": 3}, {"c": 4}]

    def test_loads_count_among_the_requests_that_hold_blocks(self) -> None:
        driver = Driver(FULL, connector=ScriptedConnector(a=4), max_running=1)
        driver.send("a")
        second = driver.send("b")
        driver.step()
        assert second.state is RequestState.WAITING

    def test_requests_are_admitted_in_their_order(self) -> None:
        driver = Driver(FULL, 4)
        driver.send("a", 9, max_tokens=1)
        driver.send("b", 12, max_tokens=1)
        driver.send("c", 1, max_tokens=1)
        assert driver.step() == {"a": 9}, "c would fit, but b is first"

    def test_the_tables_of_a_step_cover_its_tokens(self) -> None:
        driver = Driver(HYBRID)
        driver.send("r", 11)
        [sequence] = driver.scheduler.schedule().plan.sequences
        assert (sequence.start, sequence.stop) == (0, 8)
        assert [len(table) for table in sequence.tables] == [2, 2, 1]

    def test_update_returns_those_that_got_a_token(self) -> None:
        driver = Driver(FULL, max_step_tokens=8)
        first = driver.send("a", 3)
        driver.send("b", 9)
        assert driver.compute(driver.scheduler.schedule()) == [first]


class TestSharing:
    def test_a_later_request_shares_the_blocks_of_an_earlier_one(self) -> None:
        driver = Driver(FULL)
        driver.send("a", 9)
        driver.finish()
        second = driver.send("b", 9)
        assert driver.finish() == [{"b": 9}]
        assert second.local_hit_tokens == 8

    def test_equal_prompts_in_one_step_share_nothing_yet(self) -> None:
        driver = Driver(FULL)
        requests = [driver.send(name, 9, max_tokens=2) for name in "ab"]
        driver.step()
        first, second = (set(request.tables[0].blocks) for request in requests)
        assert not first & second

    def test_blocks_are_shared_with_a_request_that_still_runs(self) -> None:
        driver = Driver(FULL)
        first = driver.send("a", 9, max_tokens=3)
        driver.step()
        second = driver.send("b", 9, max_tokens=3)
        assert driver.step() == {"a": 10, "b": 9}
        assert first.tables[0].blocks[:2] == second.tables[0].blocks[:2]

    def test_answers_are_shared_too(self) -> None:
        driver = Driver(FULL)
        driver.send("a", [0, 1, 2], max_tokens=6)
        driver.finish()
        second = driver.send("b", [0, 1, 2, 1, 1, 1, 1, 1, 1])
        driver.finish()
        assert second.local_hit_tokens == 8

    def test_a_reset_cache_is_not_shared(self) -> None:
        driver = Driver(FULL)
        driver.send("a", 9)
        driver.finish()
        assert driver.scheduler.reset_cache()
        second = driver.send("b", 9)
        driver.finish()
        assert second.local_hit_tokens == 0

    def test_a_prompt_of_a_hybrid_model_can_be_used_again_up_to_its_last_state(self) -> None:
        driver = Driver(HYBRID)
        for name, hit in (("a", 0), ("b", 16)):
            request = driver.send(name, 20)
            driver.finish()
            assert request.local_hit_tokens == hit

    @pytest.mark.parametrize("budget", [1, 3, 8, 11, 100])
    def test_steps_of_a_hybrid_prompt_end_at_its_last_state(self, budget: int) -> None:
        driver = Driver(HYBRID, max_step_tokens=budget)
        driver.send("r", 24)
        assert {"r": 16} in driver.finish()


class TestPreemption:
    def test_the_youngest_makes_room_for_the_oldest(self) -> None:
        driver = Driver(FULL, 4)
        old, young = (driver.send(name, 8, max_tokens=4) for name in ("a", "b"))
        driver.step()
        assert driver.step() == {"a": 9}
        assert young.state is RequestState.WAITING
        assert not young.tables
        driver.finish()
        assert (old.num_preemptions, young.num_preemptions) == (0, 1)
        assert (len(old.output), len(young.output)) == (4, 4)

    def test_a_preempted_request_keeps_its_answer_so_far(self) -> None:
        driver = Driver(FULL, 4)
        driver.send("a", 8, max_tokens=4)
        young = driver.send("b", range(50, 58), max_tokens=4)
        driver.step()
        driver.step()
        assert young.tokens == [*range(50, 58), 1]
        driver.finish()
        assert young.output == [1, 1, 1, 1]

    def test_the_youngest_loses_its_own_blocks_when_it_needs_one(self) -> None:
        driver = Driver(FULL, 5)
        driver.send("a", 10, max_tokens=5)
        young = driver.send("b", range(50, 58), max_tokens=2)
        driver.step()
        assert driver.step() == {"a": 11}
        assert young.state is RequestState.WAITING
        driver.finish()
        assert len(young.output) == 2

    def test_preempted_requests_come_back_in_their_order(self) -> None:
        connector = ScriptedConnector()
        driver = Driver(FULL, 9, connector)
        driver.send("a", 12, max_tokens=9)
        driver.send("b", range(50, 62), max_tokens=9)
        driver.send("c", range(60, 72), max_tokens=9)
        driver.send("d", 1)
        driver.step()
        driver.step()
        assert list(connector.context.waiting_requests()) == ["c", "d"]
        assert list(connector.progress[-1].preempted) == ["c"]
        while "b" not in connector.context.waiting_requests():
            driver.step()
        assert list(connector.context.waiting_requests())[:2] == ["b", "c"]

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        driver = Driver(FULL, 4)
        driver.send("a", 8, max_tokens=4)
        driver.send("b", range(50, 58), max_tokens=4)
        driver.step()
        driver.send("c", 1)
        assert driver.step() == {"a": 9}

    def test_the_oldest_waits_for_blocks_that_a_connector_holds(self) -> None:
        connector = ScriptedConnector()
        driver = Driver(FULL, 5, connector, max_step_tokens=8)
        request = driver.send("a", 16)
        driver.step()
        connector.context.touch(driver.free()[:2])
        second = driver.send("b", 1)
        assert driver.step() == {}, "one block is free, but a needs two"
        assert request.state is RequestState.RUNNING
        assert request.num_preemptions == 0
        assert second.state is RequestState.WAITING, "the free block is not for b"
        connector.context.free_blocks([3, 4])
        assert driver.finish() == [{"a": 16}, {"b": 1}]

    def test_a_window_makes_room_for_itself(self) -> None:
        layout = a_layout(window_group(4, 4))
        driver = Driver(layout, 10, max_step_tokens=4)
        driver.pool.take(7)
        request = driver.send("r", 30, max_tokens=8)
        driver.finish()
        assert request.num_preemptions == 0


class TestAborts:
    def test_an_unknown_request_is_not_aborted(self) -> None:
        assert Driver(FULL).scheduler.abort("nobody") is None

    def test_a_waiting_request_is_aborted(self) -> None:
        driver = Driver(FULL)
        request = driver.send("r")
        assert driver.scheduler.abort("r") is request
        assert request.finish_reason is FinishReason.ABORTED
        assert driver.finish() == []

    def test_a_running_request_is_aborted_and_its_blocks_are_free(self) -> None:
        driver = Driver(FULL)
        driver.send("r", 9, max_tokens=5)
        driver.step()
        driver.scheduler.abort("r")
        assert driver.pool.num_free == 40
        assert driver.finish() == []

    def test_a_request_aborted_between_plan_and_result_gets_no_token(self) -> None:
        driver = Driver(FULL)
        request = driver.send("r", 9, max_tokens=5)
        step = driver.scheduler.schedule()
        driver.scheduler.abort("r")
        assert driver.compute(step) == []
        assert request.output == []
        assert driver.send("again", 9).state is RequestState.WAITING
        driver.finish()
        assert driver.pool.num_free == 40

    def test_what_an_aborted_step_computed_is_not_found(self) -> None:
        driver = Driver(FULL)
        driver.send("r", 9, max_tokens=5)
        step = driver.scheduler.schedule()
        driver.scheduler.abort("r")
        driver.compute(step)
        second = driver.send("s", 9)
        driver.finish()
        assert second.local_hit_tokens == 0

    def test_an_id_can_be_used_again_before_the_aborted_step_is_back(self) -> None:
        driver = Driver(FULL)
        driver.send("r", 9, max_tokens=5)
        step = driver.scheduler.schedule()
        driver.scheduler.abort("r")
        second = driver.send("r", 3, max_tokens=2)
        assert driver.compute(step) == []
        driver.finish()
        assert second.output == [1, 1]

    @pytest.mark.parametrize("is_done", [True, False])
    def test_a_loading_request_keeps_its_blocks_until_the_load_has_ended(
        self, *, is_done: bool
    ) -> None:
        connector = ScriptedConnector(r=8)
        driver = Driver(FULL, connector=connector)
        request = driver.send("r", 9)
        driver.step()
        driver.scheduler.abort("r")
        assert connector.finished_requests == ["r"]
        assert driver.pool.num_free == 38, "blocks that are being written to are not free"
        assert driver.scheduler.has_work
        ended = frozenset({"r"})
        connector.ended = EndedLoads(ended) if is_done else EndedLoads(failed=ended)
        driver.step()
        assert driver.pool.num_free == 40
        assert request.state is RequestState.ENDED
        assert not driver.scheduler.has_work
