"""The engine answers as `transformers` does, whatever is cut, cached, shared or taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.engine import FinishReason, SamplingParams

if TYPE_CHECKING:
    from kvstrata.testing.tiny_models import TinyModel

GREEDY = SamplingParams(max_tokens=6, keep_logits=True)


def test_one_request_at_a_time(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        answers = [engine.generate([prompt], GREEDY)[0] for prompt in tiny.prompts]

    tiny.check(answers)
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    assert all(len(answer.logits) == 6 for answer in answers)


@pytest.mark.parametrize("max_step_tokens", [7, 16, 50, 512])
def test_side_by_side_and_in_chunks(tiny: TinyModel, max_step_tokens: int) -> None:
    with tiny.engine(max_step_tokens=max_step_tokens) as engine:
        tiny.check(engine.generate(tiny.prompts, GREEDY))


def test_a_second_run_finds_the_prefixes(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        first = engine.generate(tiny.prompts, GREEDY)
        second = engine.generate(tiny.prompts, GREEDY)

        assert [answer.local_hit_tokens for answer in first] == [0] * len(tiny.prompts)
        assert [answer.local_hit_tokens for answer in second] == tiny.hits(engine.layout)
        assert sum(answer.local_hit_tokens for answer in second) > 0
        tiny.check(first)
        tiny.check(second)


@pytest.mark.slow
@pytest.mark.parametrize("max_step_tokens", [7, 50])
def test_prefixes_are_found_after_chunked_prefills(tiny: TinyModel, max_step_tokens: int) -> None:
    with tiny.engine(max_step_tokens=max_step_tokens) as engine:
        engine.generate(tiny.prompts, GREEDY)
        answers = engine.generate(tiny.prompts, GREEDY)

        tiny.check(answers)
        if not any(group.kind == "recurrent" for group in engine.layout.groups):
            assert [answer.local_hit_tokens for answer in answers] == tiny.hits(engine.layout)


def test_a_longer_prompt_goes_on_behind_an_answer(tiny: TinyModel) -> None:
    longer = tiny.prompts[0] + tiny.expected[0].tokens + tiny.prompts[2]
    with tiny.engine() as engine:
        engine.generate(tiny.prompts[:1], GREEDY)
        [answer] = engine.generate([longer], SamplingParams(max_tokens=4))

    assert answer.local_hit_tokens >= 192
    assert answer.tokens == tiny.reference.answer(longer, 4).tokens


def test_requests_that_lose_their_blocks_start_again(tiny: TinyModel) -> None:
    with tiny.engine(num_blocks=tiny.blocks_needed(94 + 6)) as engine:
        tiny.without_longest().answer_crowded(engine, GREEDY)


def test_a_prompt_is_shared_while_it_runs(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        [first] = tiny.prompts[:1]
        requests = [engine.add_request(first, GREEDY)]
        for _ in range(3):
            engine.step()
        requests.append(engine.add_request(first, GREEDY))
        engine.run_until_idle(1_000)

        assert requests[1].local_hit_tokens == tiny.hits(engine.layout)[0]
        assert [request.output for request in requests] == [tiny.expected[0].tokens] * 2


def test_bfloat16_runs_and_finds_prefixes(tiny: TinyModel) -> None:
    with tiny.engine(dtype="bfloat16") as engine:
        assert engine.layout.dtype == "bfloat16"
        first = engine.generate(tiny.prompts, GREEDY)
        second = engine.generate(tiny.prompts, GREEDY)

        assert all(len(answer.tokens) == 6 for answer in first + second)
        assert [a.local_hit_tokens for a in second] == tiny.hits(engine.layout)
    for answer, expected in zip(first, tiny.expected, strict=True):
        found, wanted = answer.logits[0], expected.logits[0]
        largest = max(map(abs, wanted))
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 0.2 * largest


def test_drawn_answers_repeat_with_their_seed(tiny: TinyModel) -> None:
    def draw(seed: int) -> list[int]:
        [answer] = engine.generate(
            tiny.prompts[2:3], SamplingParams(max_tokens=16, temperature=1.5, seed=seed)
        )
        tokens: list[int] = answer.tokens
        return tokens

    with tiny.engine() as engine:
        first = draw(1)
        engine.reset_cache()
        assert draw(1) == first
        assert draw(2) != first
        assert draw(2**70) == draw(2**70)


def test_answers_end_with_a_stop_token(tiny: TinyModel) -> None:
    tokens = tiny.expected[0].tokens
    stop = tokens[3]
    with tiny.engine() as engine:
        [answer] = engine.generate(
            tiny.prompts[:1], SamplingParams(max_tokens=6, stop_tokens=frozenset({stop}))
        )

    assert answer.tokens == tokens[: tokens.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
