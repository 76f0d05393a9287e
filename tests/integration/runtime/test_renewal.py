"""Weights that change in a running engine: nothing of the old ones is ever served again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.engine import SamplingParams

from .support import GREEDY, Bed, tokens_of

if TYPE_CHECKING:
    from kvstrata.runtime.seam import BlockTables

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
