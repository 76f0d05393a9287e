"""The chunked scan gives what the recurrence gives, token by token."""

from __future__ import annotations

import pytest
import torch

from kvstrata.engine.nn.selective_scan import ScanInput, Scanned, selective_scan

HEADS, HEAD_DIM, STATE = 4, 3, 5


def a_scan(num_tokens: int, groups: int = 2, sequences: int = 2) -> ScanInput:
    generator = torch.Generator().manual_seed(num_tokens)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(sequences, num_tokens, *shape, generator=generator)

    return ScanInput(
        noise(HEADS, HEAD_DIM),
        noise(HEADS).abs() * 0.2,
        noise(groups, STATE),
        noise(groups, STATE),
    )


def some_rates() -> torch.Tensor:
    return -torch.linspace(0.05, 1.0, HEADS)


def a_state(sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(sequences, HEADS, HEAD_DIM, STATE, generator=generator)


def by_recurrence(tokens: ScanInput, rates: torch.Tensor, state: torch.Tensor) -> Scanned:
    """Token by token, head by head, in float64."""
    values, steps, keys, queries = (part.double() for part in tokens)
    state, rates = state.double().clone(), rates.double()
    output = torch.zeros_like(values)
    heads_per_group = HEADS // keys.shape[2]
    for token in range(values.shape[1]):
        for head in range(HEADS):
            key, query = (part[:, token, head // heads_per_group] for part in (keys, queries))
            step = steps[:, token, head]
            added = torch.einsum("sp,sn->spn", values[:, token, head] * step[:, None], key)
            decay = torch.exp(step * rates[head])
            state[:, head] = state[:, head] * decay[:, None, None] + added
            output[:, token, head] = torch.einsum("spn,sn->sp", state[:, head], query)
    return Scanned(output, state)


def check(found: Scanned, wanted: Scanned) -> None:
    for part, wanted_part in zip(found, wanted, strict=True):
        torch.testing.assert_close(part, wanted_part.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_chunks_give_what_the_recurrence_gives(num_tokens: int, groups: int) -> None:
    tokens = a_scan(num_tokens, groups)
    found = selective_scan(tokens, some_rates(), a_state())
    check(found, by_recurrence(tokens, some_rates(), a_state()))


@pytest.mark.parametrize("cuts", [(1, 1, 98), (64, 36), (30, 1, 69)])
def test_a_state_goes_on_where_it_stopped(cuts: tuple[int, ...]) -> None:
    tokens, state, outputs = a_scan(100), a_state(), []
    for piece in zip(*(part.split(cuts, 1) for part in tokens), strict=True):
        output, state = selective_scan(ScanInput(*piece), some_rates(), state)
        outputs.append(output)
    whole = selective_scan(tokens, some_rates(), a_state())
    check(Scanned(torch.cat(outputs, 1), state), whole)


def test_the_state_before_matters_for_more_than_a_chunk() -> None:
    tokens = a_scan(100)
    with_past = selective_scan(tokens, some_rates(), a_state()).output
    without = selective_scan(tokens, some_rates(), torch.zeros_like(a_state())).output
    assert (with_past - without)[:, -1].abs().max() > 0.1


def test_sequences_do_not_see_each_other() -> None:
    tokens = a_scan(70)
    both = selective_scan(tokens, some_rates(), a_state())
    second = ScanInput(*(part[1:] for part in tokens))
    check(selective_scan(second, some_rates(), a_state()[1:]), Scanned(*(p[1:] for p in both)))


def test_tokens_with_no_step_leave_the_state_as_it_is() -> None:
    tokens = a_scan(70)._replace(steps=torch.zeros(2, 70, HEADS))
    torch.testing.assert_close(selective_scan(tokens, some_rates(), a_state()).state, a_state())


def test_a_state_may_vanish_at_once() -> None:
    tokens = a_scan(130)
    rates = torch.full((HEADS,), -1e4)
    found = selective_scan(tokens, rates, a_state())
    assert all(part.isfinite().all() for part in found)
    check(found, by_recurrence(tokens, rates, a_state()))


def test_inputs_and_the_state_before_are_left_alone() -> None:
    tokens, state = a_scan(70), a_state()
    selective_scan(tokens, some_rates(), state)
    assert torch.equal(state, a_state())
    assert all(torch.equal(*parts) for parts in zip(tokens, a_scan(70), strict=True))
