"""Weights that change in a running engine: nothing of the old ones is ever served again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.engine import EngineOptions, SamplingParams

from .support import GREEDY, Bed, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.runtime.seam import BlockTables, EndedLoads, NewRequest

    from .conftest import Models, Tiers

PROMPT = tokens_of(120)


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_no_tier_serves_what_was_stored_before(
    arch: str, mode: str, model: Models, tier: Tiers
) -> None:
    with Bed(model(arch), tier("filesystem"), store={"mode": "eager"}) as bed:
        bed.ask(PROMPT)
    settings: dict[str, Any] = {"store": {"mode": mode}, "events": {"self_describing": True}}
    with Bed(model(arch), tier("filesystem"), **settings) as bed:
        assert bed.ask(PROMPT).external_hit_tokens > 0, "it is there"
        bed.drop_device()

        assert bed.side.renew()
        assert not bed.side.tracker.residencies("filesystem"), "out of reach"
        answer = bed.ask(PROMPT)

        assert answer.external_hit_tokens == 0
        assert not bed.side.hook_faults


def test_what_is_stored_afterwards_is_found_by_this_engine_alone(
    model: Models, tier: Tiers
) -> None:
    place = tier("filesystem")
    with Bed(model("llama"), place) as bed:
        assert bed.side.renew()
        bed.ask(PROMPT)
        bed.drop_host()
        assert bed.ask(PROMPT).external_hit_tokens > 0

    with Bed(model("llama"), place) as other:
        assert other.ask(PROMPT).external_hit_tokens == 0


def test_a_request_that_was_running_is_not_stored(model: Models) -> None:
    with Bed(model("llama")) as bed:
        request = bed.engine.add_request(PROMPT, SamplingParams(max_tokens=20))
        bed.step_until(lambda: bool(request.output))
        assert bed.side.renew()
        bed.step_until(lambda: request.finish_reason is not None)
        bed.settle()

        assert not bed.side.host_keys()
        bed.drop_device()
        assert bed.ask(PROMPT, GREEDY).external_hit_tokens == 0
        assert bed.side.host_keys(), "a new one is"


def test_blocks_are_let_go_of_at_once(model: Models) -> None:
    with Bed(model("llama")) as bed:
        request = bed.engine.add_request(PROMPT, SamplingParams(max_tokens=1))
        bed.engine.step()
        bed.side.let_blocks_go()

        assert not bed.side.holds_blocks
        bed.step_until(lambda: request.finish_reason is not None)
        bed.settle()


def test_sources_of_a_load_are_told_while_it_is_under_way(
    model: Models, tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, int] = {}
    with Bed(model("llama"), tier("filesystem")) as bed:
        really = bed.side.allocated

        def allocated(request_id: str, tables: BlockTables, external_tokens: int) -> None:
            really(request_id, tables, external_tokens)
            told.update(bed.side.hit_sources(request_id))

        monkeypatch.setattr(bed.side, "allocated", allocated)
        bed.ask(PROMPT)
        assert not told
        for source, forget in (("host", bed.drop_device), ("filesystem", bed.drop_host)):
            forget()
            told.clear()
            answer = bed.ask(PROMPT)
            assert told == {source: answer.external_hit_tokens}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_request_that_another_adapter_answers_is_not_stored_any_more(
    mode: str, model: Models
) -> None:
    with Bed(model("llama"), store={"mode": mode}) as bed:
        request = bed.engine.add_request(PROMPT, SamplingParams(max_tokens=20))
        bed.step_until(lambda: bool(request.output))
        tracked = bed.side._requests[request.request_id]  # noqa: SLF001 - looked into on purpose
        stored = bed.side.host_keys()
        bed.side.distrust_stores()
        bed.side.change_request(replace(tracked.new, adapter_weights=b"other"))
        bed.step_until(lambda: request.finish_reason is not None)
        bed.settle()

        assert bed.side.host_keys() == stored
        assert not bed.side.holds_blocks


def test_stores_that_are_doubted_do_not_count(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bed(model("llama")) as bed:
        really = bed.side.report

        def report(reports: Sequence[bytes]) -> EndedLoads:
            bed.side.distrust_stores()
            return really(reports)

        monkeypatch.setattr(bed.side, "report", report)
        bed.ask(PROMPT)

        assert not bed.side.host_keys()


def test_doubted_blocks_are_not_stored_when_they_leave_the_device(model: Models) -> None:
    options = EngineOptions(num_blocks=24)
    with Bed(model("llama"), options=options, store={"mode": "lazy"}) as bed:
        for is_doubted in (False, True):
            first, *others = (tokens_of(120, seed=10 * is_doubted + n) for n in range(1, 5))
            bed.ask(first)
            if is_doubted:
                bed.side.distrust_stores()
            for other in others:
                bed.ask(other)
            assert (bed.ask(first).external_hit_tokens > 0) is not is_doubted


def test_an_adapters_weights_are_part_of_a_requests_keys(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[int] = []
    with Bed(model("llama")) as bed:
        add = bed.side.add_request
        for weights in (b"", b"red", b"blue", b"red"):

            def with_adapter(new: NewRequest, weights: bytes = weights) -> None:
                add(replace(new, adapter_weights=weights))

            monkeypatch.setattr(bed.side, "add_request", with_adapter)
            bed.drop_device()
            hits.append(bed.ask(PROMPT).external_hit_tokens)
        assert bed.side.renew()
        bed.drop_device()
        hits.append(bed.ask(PROMPT).external_hit_tokens)

    assert [hit > 0 for hit in hits] == [False, False, False, True, False]
