"""What does not depend on the architecture: streams, aborts, salts, closing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.engine import FinishReason, SamplingParams
from kvstrata.errors import ClosedError, EngineError, RequestError

if TYPE_CHECKING:
    from kvstrata.testing.tiny_models import TinyModel

GREEDY = SamplingParams(max_tokens=6)


def test_a_stream_has_the_tokens_of_the_answers(llama: TinyModel) -> None:
    streamed: dict[str, list[int]] = {}
    reasons = []
    with llama.engine() as engine:
        for new in engine.stream(llama.prompts, GREEDY):
            streamed.setdefault(new.request_id, []).append(new.token)
            if new.finish_reason:
                reasons.append(new.finish_reason)

    assert [streamed[f"request-{i}"] for i in range(5)] == [e.tokens for e in llama.expected]
    assert reasons == [FinishReason.LENGTH] * 5


def test_who_stops_listening_aborts(llama: TinyModel) -> None:
    with llama.engine() as engine:
        stream = engine.stream(llama.prompts, SamplingParams(max_tokens=500, keep_logits=True))
        for _ in range(7):
            next(stream)
        assert len(engine.scheduler.requests) == 5
        stream.close()

        assert not engine.scheduler.requests
        pool = engine.scheduler.blocks.pool
        assert pool.num_free == pool.num_blocks - 1
        llama.check(engine.generate(llama.prompts, GREEDY))


def test_a_stream_leaves_the_requests_of_others_alone(llama: TinyModel) -> None:
    with llama.engine() as engine:
        other = engine.add_request(llama.prompts[0], GREEDY)
        for _ in engine.stream(llama.prompts[1:2], SamplingParams(max_tokens=3)):
            pass
        assert other.finish_reason is None
        engine.run_until_idle(100)

        assert other.output == llama.expected[0].tokens


def test_salts_keep_caches_apart(llama: TinyModel) -> None:
    prompt = llama.prompts[0]
    with llama.engine() as engine:
        requests = []
        for salt in ("a", "b", "a", None):
            requests.append(engine.add_request(prompt, GREEDY, cache_salt=salt))
            engine.run_until_idle(100)

        [hit, *_] = llama.hits(engine.layout)
        assert [request.local_hit_tokens for request in requests] == [0, 0, hit, 0]
        assert [request.output for request in requests] == [llama.expected[0].tokens] * 4


def test_a_request_can_be_aborted_in_any_state(llama: TinyModel) -> None:
    with llama.engine(max_step_tokens=50) as engine:
        waiting, running = (engine.add_request(llama.prompts[i], GREEDY) for i in (0, 1))
        engine.abort(waiting.request_id)
        engine.step()
        engine.abort(running.request_id)
        engine.abort(running.request_id)
        engine.abort("nobody")

        assert not engine.scheduler.has_work
        assert [engine.answer(r).finish_reason for r in (waiting, running)] == ["aborted"] * 2


def test_one_bad_prompt_starts_none(llama: TinyModel) -> None:
    with llama.engine() as engine:
        with pytest.raises(RequestError, match="token 999 is not in the vocabulary"):
            engine.generate([[1, 2, 3], [4, 999]], GREEDY)
        assert not engine.scheduler.requests


def test_a_reset_forgets_prefixes(llama: TinyModel) -> None:
    with llama.engine() as engine:
        engine.generate(llama.prompts, GREEDY)
        assert engine.reset_cache()

        answers = engine.generate(llama.prompts, GREEDY)
        assert [answer.local_hit_tokens for answer in answers] == [0] * 5
        llama.check(answers)


def test_a_closed_engine_says_so(llama: TinyModel) -> None:
    with llama.engine() as engine:
        pass
    engine.close()
    engine.abort("request-0")

    with pytest.raises(ClosedError, match="the engine is closed"):
        engine.generate([[1]])


def test_being_busy_for_too_long_is_an_error(llama: TinyModel) -> None:
    with llama.engine() as engine:
        engine.add_request([1], SamplingParams(max_tokens=20))
        with pytest.raises(EngineError, match="still at work after 3 steps"):
            engine.run_until_idle(step_limit=3)


def test_an_interrupted_answer_is_dropped(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama.engine() as engine:

        def interrupt() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(llama.prompts, GREEDY)
        assert not engine.scheduler.requests
        llama.check(engine.generate(llama.prompts, GREEDY))
