from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.engine.scheduling.chunking import next_stop, state_stride
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

if TYPE_CHECKING:
    from kvstrata.core.layout import KVGroup


@pytest.mark.parametrize(
    ("groups", "stride"),
    [
        ([full_group(16), window_group(8, 16)], None),
        ([full_group(16), recurrent_group(48)], 48),
        ([recurrent_group(32), recurrent_group(48), full_group(80)], 96),
    ],
)
def test_states_decide_the_stride_alone(groups: list[KVGroup], stride: int | None) -> None:
    assert state_stride(a_layout(*groups)) == stride


@pytest.mark.parametrize(
    ("computed", "num_tokens", "budget", "expected"),
    [(0, 10, 100, 10), (0, 10, 4, 4), (4, 10, 4, 8), (8, 10, 4, 10), (9, 10, 1, 10)],
)
def test_without_states_a_step_takes_what_it_can(
    computed: int, num_tokens: int, budget: int, expected: int
) -> None:
    assert next_stop(computed, num_tokens, budget, None) == expected


@pytest.mark.parametrize(
    ("computed", "num_tokens", "budget", "expected"),
    [
        (0, 40, 100, 32),  # once before the last token, at the last state that can be used again
        (32, 40, 100, 40),
        (0, 33, 100, 32),
        (0, 32, 100, 16),  # a state at 32 would leave no token to compute
        (16, 32, 100, 32),
        (0, 16, 100, 16),
        (0, 9, 100, 9),
        (0, 40, 20, 16),  # a budget that ends between two states ends at the first
        (0, 40, 10, 10),
        (10, 40, 10, 16),
        (10, 40, 3, 13),
        (16, 17, 100, 17),
        (32, 33, 1, 33),
    ],
)
def test_with_states_every_sixteen_tokens(
    computed: int, num_tokens: int, budget: int, expected: int
) -> None:
    assert next_stop(computed, num_tokens, budget, 16) == expected


@pytest.mark.parametrize("stride", [1, 3, 4, 7])
@pytest.mark.parametrize("budget", [1, 2, 4, 5, 30])
def test_every_prompt_leaves_the_last_state_that_can_be_used_again(
    stride: int, budget: int
) -> None:
    for num_tokens in range(1, 30):
        stops = [0]
        while stops[-1] < num_tokens:
            stops.append(next_stop(stops[-1], num_tokens, budget, stride))
            assert stops[-2] < stops[-1] <= stops[-2] + budget
        assert stops[-1] == num_tokens
        assert (num_tokens - 1) // stride * stride in stops
