"""Experts add up what each token's own experts say."""

from __future__ import annotations

import torch
from torch.nn.functional import relu

from kvstrata.engine.nn.experts import Experts, choose_experts
from kvstrata.engine.nn.parallel import TensorParallel

COUNT, HIDDEN, INSIDE, CHOSEN = 6, 8, 4, 3


def make_experts() -> Experts:
    experts = Experts(COUNT, HIDDEN, INSIDE, TensorParallel(), relu)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    return experts


def test_weights_are_named_as_in_checkpoints() -> None:
    names = {name for name, _ in make_experts().named_parameters()}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert names == {f"{i}.{part}.weight" for i in range(COUNT) for part in parts}


def test_each_token_goes_through_its_own_experts() -> None:
    experts = make_experts()
    x, scores = torch.randn(10, HIDDEN), torch.rand(10, COUNT - 1)
    weights, indices = choose_experts(scores, CHOSEN, normalise=False)
    expected = [
        sum(w * experts[i](token) for w, i in zip(its_weights, its_indices.tolist(), strict=True))
        for token, its_weights, its_indices in zip(x, weights, indices, strict=True)
    ]
    torch.testing.assert_close(experts(x, weights, indices), torch.stack(expected))


def test_no_tokens() -> None:
    none = torch.empty(0, HIDDEN)
    assert make_experts()(none, torch.empty(0, 3), torch.empty(0, 3, dtype=torch.long)).shape == (
        0,
        HIDDEN,
    )


def test_wide_weights_leave_the_dtype_alone() -> None:
    experts = make_experts().to(torch.bfloat16)
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    weights, indices = choose_experts(torch.rand(4, COUNT), CHOSEN, normalise=True)
    assert experts(x, weights, indices).dtype == torch.bfloat16


def test_choice_by_scores() -> None:
    weights, indices = choose_experts(torch.tensor([[0.1, 0.6, 0.3]]), 2, normalise=True)
    assert indices.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3]]))


def test_choice_by_another_ranking() -> None:
    scores, ranking = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[9.0, 1.0, 5.0]])
    weights, indices = choose_experts(scores, 2, normalise=False, ranking=ranking)
    assert indices.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.3]]))
