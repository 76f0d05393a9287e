"""Every architecture gives the scores and tokens of `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ARCHITECTURES = [
    "llama",
    "mistral",
    "gemma3",
    "deepseek_v3",
    "lfm2",
    "granite_hybrid",
    "qwen3_next",
]

CUTS = {
    "at once": [97],
    "in the middle of blocks": [7, 20, 61, 97],
    "at the ends of blocks": [16, 48, 96, 97],
    "one by one at the end": [90, 91, 92, 93, 94, 95, 96, 97],
    "one by one at the start": [1, 2, 3, 4, 5, 97],
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def parity(request: pytest.FixtureRequest, make_parity: Any) -> Any:  # noqa: ANN401
    return make_parity(request.param)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_one_sequence(parity: Any, cuts: Sequence[int]) -> None:  # noqa: ANN401
    with parity.ranks() as ranks:
        parity.check(ranks, [parity.prompt(97)], cuts)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_several_sequences_of_different_lengths(parity: Any, cuts: Sequence[int]) -> None:  # noqa: ANN401
    prompts = [parity.prompt(length, seed=length) for length in (97, 1, 33, 64)]
    with parity.ranks() as ranks:
        parity.check(ranks, prompts, cuts)


@pytest.mark.slow
def test_two_ranks(parity: Any) -> None:  # noqa: ANN401
    prompts = [parity.prompt(length, seed=length) for length in (97, 40)]
    with parity.ranks(2) as ranks:
        parity.check(ranks, prompts, [7, 48, 49, 50, 97])
