"""The chunked gated delta rule against the rule itself, token by token."""

from __future__ import annotations

import pytest
import torch

from kvstrata.engine.nn.gated_delta import (
    DeltaInputs,
    DeltaOutputs,
    gated_delta,
    gated_delta_chunks,
    gated_delta_step,
)

SEQUENCES, KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 6, 8, 5
LENGTHS = (1, 2, 3, 63, 64, 65, 130)


def an_input(num_tokens: int, *, strongest_decay: float = 0.1) -> DeltaInputs:
    generator = torch.Generator().manual_seed(num_tokens)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(SEQUENCES, num_tokens, *shape, generator=generator)

    return DeltaInputs(
        query=noise(KEY_HEADS, KEY_WIDTH),
        key=noise(KEY_HEADS, KEY_WIDTH),
        value=noise(VALUE_HEADS, VALUE_WIDTH),
        log_decay=-strongest_decay * noise(VALUE_HEADS).sigmoid(),
        beta=noise(VALUE_HEADS).sigmoid(),
    )


def a_state() -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(SEQUENCES, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, generator=generator)


def part(inputs: DeltaInputs, start: int, stop: int) -> DeltaInputs:
    return DeltaInputs(*(x[:, start:stop] for x in inputs))


def token_by_token(inputs: DeltaInputs, state: torch.Tensor) -> DeltaOutputs:
    """The rule as it is written, one head after the other, in float64."""
    state = state.double().clone()
    output = torch.zeros_like(inputs.value, dtype=torch.float64)
    for s in range(SEQUENCES):
        for h in range(VALUE_HEADS):
            for t in range(inputs.value.shape[1]):
                key_head = h // (VALUE_HEADS // KEY_HEADS)
                q, k = (x[s, t, key_head].double() for x in (inputs.query, inputs.key))
                q, k = q / q.norm(), k / k.norm()
                memory = state[s, h] * inputs.log_decay[s, t, h].double().exp()
                missing = inputs.value[s, t, h].double() - memory.T @ k
                state[s, h] = memory + inputs.beta[s, t, h].double() * torch.outer(k, missing)
                output[s, t, h] = state[s, h].T @ q / KEY_WIDTH**0.5
    return DeltaOutputs(output, state)


def assert_close(found: DeltaOutputs, wanted: DeltaOutputs, tolerance: float = 1e-5) -> None:
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left.double(), right.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_any_number_of_tokens_follows_the_rule(num_tokens: int) -> None:
    inputs, state = an_input(num_tokens), a_state()
    assert_close(gated_delta(inputs, state), token_by_token(inputs, state))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 128])
def test_any_chunk_follows_the_rule(chunk_tokens: int) -> None:
    inputs, state = an_input(40), a_state()
    found = gated_delta_chunks(inputs, state, chunk_tokens=chunk_tokens)
    assert_close(found, token_by_token(inputs, state))


def test_one_token_is_a_chunk_of_one() -> None:
    inputs, state = an_input(1), a_state()
    assert_close(gated_delta_step(inputs, state), gated_delta_chunks(inputs, state))


@pytest.mark.parametrize("cut", [1, 64, 70, 129])
def test_the_state_is_all_that_later_tokens_need(cut: int) -> None:
    inputs = an_input(130)
    whole = gated_delta(inputs, a_state())
    first = gated_delta(part(inputs, 0, cut), a_state())
    second = gated_delta(part(inputs, cut, 130), first.state)
    output = torch.cat((first.output, second.output), 1)
    assert_close(DeltaOutputs(output, second.state), whole)


def test_the_state_before_matters_to_the_last_token() -> None:
    inputs = an_input(130)
    with_past = gated_delta(inputs, 1000 * a_state()).output[:, -1]
    without = gated_delta(inputs, torch.zeros_like(a_state())).output[:, -1]
    assert (with_past - without).abs().max() > 1e-3


def test_strong_forgetting_stays_finite() -> None:
    inputs, state = an_input(130, strongest_decay=40.0), a_state()
    assert_close(gated_delta(inputs, state), token_by_token(inputs, state))


def test_given_tensors_are_left_as_they_were() -> None:
    inputs, state = an_input(65), a_state()
    gated_delta(inputs, state)
    torch.testing.assert_close(state, a_state())
    for left, right in zip(inputs, an_input(65), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("num_tokens", [1, 65])
def test_bfloat16_inputs_are_computed_in_float32(num_tokens: int) -> None:
    inputs = DeltaInputs(*(x.bfloat16() for x in an_input(num_tokens)))
    found, wanted = gated_delta(inputs, a_state()), token_by_token(inputs, a_state())
    assert found.output.dtype == torch.bfloat16
    assert found.state.dtype == torch.float32
    torch.testing.assert_close(found.state.double(), wanted.state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.output.double(), wanted.output, atol=1e-2, rtol=1e-2)
