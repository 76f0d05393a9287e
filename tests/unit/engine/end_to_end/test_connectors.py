"""Blocks that a connector stored come back: counted, bit for bit, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.engine import SamplingParams
from kvstrata.engine.cache.prefix_cache import needed_positions
from kvstrata.engine.scheduling.request import RequestState
from kvstrata.testing.memory_connector import Behaviour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.engine import Engine
    from kvstrata.testing.tiny_models import Memory, TinyModel

GREEDY = SamplingParams(max_tokens=6, keep_logits=True)


def forget_device(engine: Engine) -> None:
    """The device's prefixes are gone; the connector's are not."""
    engine.run_until_idle(100)
    engine.scheduler.blocks.pool.forget_all()


def num_needed(layout: KVLayout, hits: Sequence[int]) -> int:
    """Blocks that make up hits of these lengths."""
    return sum(len(needed_positions(group, hit)) for group in layout.groups for hit in hits if hit)


def check_round_trip(tiny: TinyModel, memory: Memory, engine: Engine) -> None:
    """Each prompt alone in its steps, so that equal caches give equal bits."""
    hits = tiny.hits(engine.layout)
    cold, local, loaded = [], [], []
    for prompt in tiny.prompts:
        cold += engine.generate([prompt], GREEDY)
        local += engine.generate([prompt], GREEDY)
        forget_device(engine)
        loaded += engine.generate([prompt], GREEDY)

    tiny.check(cold)
    tiny.check(loaded)
    assert [(a.local_hit_tokens, a.external_hit_tokens) for a in local] == [(h, 0) for h in hits]
    assert [(a.local_hit_tokens, a.external_hit_tokens) for a in loaded] == [(0, h) for h in hits]
    assert memory.num_loaded_blocks == num_needed(engine.layout, hits) > 0
    assert [answer.logits for answer in loaded] == [answer.logits for answer in local]


def test_what_was_stored_comes_back_bit_for_bit(tiny: TinyModel, memory: Memory) -> None:
    with tiny.engine(memory.parts) as engine:
        check_round_trip(tiny, memory, engine)


def test_bfloat16_comes_back_bit_for_bit(tiny: TinyModel, memory: Memory) -> None:
    with tiny.engine(memory.parts, dtype="bfloat16") as engine:
        [hit, *_] = tiny.hits(engine.layout)
        engine.generate(tiny.prompts[:1], GREEDY)
        [local] = engine.generate(tiny.prompts[:1], GREEDY)
        forget_device(engine)
        [loaded] = engine.generate(tiny.prompts[:1], GREEDY)

        assert (local.local_hit_tokens, loaded.external_hit_tokens) == (hit, hit)
        assert loaded.logits == local.logits


@pytest.mark.parametrize("max_step_tokens", [7, 50, 512])
def test_loads_side_by_side(tiny: TinyModel, memory: Memory, max_step_tokens: int) -> None:
    with tiny.engine(memory.parts, max_step_tokens=max_step_tokens) as engine:
        engine.generate(tiny.prompts, GREEDY)
        forget_device(engine)
        answers = engine.generate(tiny.prompts, GREEDY)

        tiny.check(answers)
        hits = [answer.external_hit_tokens for answer in answers]
        assert sum(hits) > 0
        assert memory.num_loaded_blocks == num_needed(engine.layout, hits)


def test_a_load_goes_on_behind_a_local_hit(tiny: TinyModel, memory: Memory) -> None:
    [prompt, *_] = tiny.prompts
    with tiny.engine(memory.parts) as engine:
        [hit, *_] = tiny.hits(engine.layout)
        engine.generate([prompt], GREEDY)
        forget_device(engine)
        engine.generate([prompt[: 64 + 1]], SamplingParams(max_tokens=1))
        [answer] = engine.generate([prompt], GREEDY)

        assert answer.local_hit_tokens == 64
        assert answer.external_hit_tokens == hit - 64 > 0
        assert answer.tokens == tiny.expected[0].tokens


@pytest.mark.slow
def test_preempted_requests_load_again(tiny: TinyModel, memory: Memory) -> None:
    num_blocks = tiny.blocks_needed(94 + 6)
    with tiny.engine(memory.parts, num_blocks=num_blocks) as engine:
        for _ in range(2):
            tiny.without_longest().answer_crowded(engine, GREEDY)
            forget_device(engine)

    assert memory.num_loaded_blocks > 0


MISBEHAVIOUR = {
    "slow": Behaviour(load_steps=3),
    "undecided": Behaviour(undecided=2),
    "slow and undecided": Behaviour(load_steps=2, undecided=3),
    "one load fails": Behaviour(failing_loads=1),
    "loads fail slowly": Behaviour(failing_loads=4, load_steps=2),
    "every load fails": Behaviour(failing_loads=1_000),
}


@pytest.mark.slow
def test_a_connector_may_misbehave(tiny: TinyModel, memory: Memory) -> None:
    with tiny.engine(memory.parts) as engine:
        engine.generate(tiny.prompts, GREEDY)
        for name, behaviour in MISBEHAVIOUR.items():
            forget_device(engine)
            vars(memory.behaviour).update(vars(behaviour))
            before = memory.num_loaded_blocks
            answers = engine.generate(tiny.prompts, GREEDY)

            tiny.check(answers)
            hits = [answer.external_hit_tokens for answer in answers]
            never = behaviour.failing_loads == 1_000
            assert hits == ([0] * 5 if never else tiny.hits(engine.layout)), name
            assert memory.num_loaded_blocks - before == num_needed(engine.layout, hits), name


def test_a_request_can_be_aborted_while_it_loads(tiny: TinyModel, memory: Memory) -> None:
    with tiny.engine(memory.parts) as engine:
        engine.generate(tiny.prompts, GREEDY)
        forget_device(engine)
        memory.behaviour.load_steps = 4
        requests = [engine.add_request(prompt, GREEDY) for prompt in tiny.prompts]
        engine.step()
        loading = [r for r in requests if r.state is RequestState.LOADING]
        written = {b for r in loading for table in r.tables for b in table.blocks if b}
        for request in requests:
            engine.abort(request.request_id)
        pool = engine.scheduler.blocks.pool
        assert pool.num_blocks - 1 - pool.num_free == len(written) > 0, "they are still written to"
        engine.run_until_idle(20)

        assert pool.num_free == pool.num_blocks - 1
        memory.behaviour.load_steps = 0
        forget_device(engine)
        tiny.check(engine.generate(tiny.prompts, GREEDY))


def test_a_reset_reaches_the_connector(llama: TinyModel, memory: Memory) -> None:
    with llama.engine(memory.parts) as engine:
        engine.generate(llama.prompts, GREEDY)
        engine.run_until_idle(100)
        assert engine.reset_cache()
        answers = engine.generate(llama.prompts, GREEDY)

        assert [answer.external_hit_tokens for answer in answers] == [0] * 5
        llama.check(answers)


@pytest.mark.slow
def test_two_ranks(tiny: TinyModel, memory: Memory) -> None:
    num_blocks = tiny.blocks_needed(94 + 6)
    tiny = tiny.without_longest()
    with tiny.engine(memory.parts, num_ranks=2, num_blocks=num_blocks) as engine:
        check_round_trip(tiny, memory, engine)
        forget_device(engine)
        vars(memory.behaviour).update(load_steps=2, undecided=2, failing_loads=2)
        answers = engine.generate(tiny.prompts, GREEDY)

        tiny.check(answers)
        assert sum(answer.external_hit_tokens for answer in answers) > 0
        tiny.answer_crowded(engine, GREEDY)
