"""The short convolution against torch's own, whole and in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from kvstrata.engine.checkpoint import wanted_weights
from kvstrata.engine.nn.parallel import TensorParallel
from kvstrata.engine.nn.short_conv import ShortConv, short_conv

SEQUENCES, TOKENS, CHANNELS, KERNEL = 3, 20, 6, 4


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh() -> torch.Tensor:
    return torch.zeros(SEQUENCES, CHANNELS, KERNEL - 1)


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    channels_first = pad(x.transpose(1, 2), (KERNEL - 1, 0))
    return conv1d(channels_first, weight[:, None], bias, groups=CHANNELS).transpose(1, 2)


@pytest.mark.parametrize("bias", [None, noise(CHANNELS, seed=2)], ids=["plain", "with bias"])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [2, 7, 19], range(TOKENS)])
def test_pieces_give_what_the_whole_gives(cuts: list[int], bias: torch.Tensor | None) -> None:
    x, weight, state = noise(SEQUENCES, TOKENS, CHANNELS), noise(CHANNELS, KERNEL, seed=1), fresh()
    outputs = []
    for start, stop in pairwise(sorted({0, *cuts, TOKENS})):
        output, state = short_conv(x[:, start:stop], state, weight, bias)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), expected(x, weight, bias))
    torch.testing.assert_close(state, x[:, 1 - KERNEL :].transpose(1, 2))


def test_the_state_before_is_seen_by_the_first_tokens_alone() -> None:
    x, weight = noise(SEQUENCES, TOKENS, CHANNELS), noise(CHANNELS, KERNEL, seed=1)
    changed = (
        short_conv(x, fresh() + 1, weight).output - short_conv(x, fresh(), weight).output
    ).abs()
    assert (changed[:, : KERNEL - 1] > 0).all()
    assert (changed[:, KERNEL - 1 :] == 0).all()


def test_bfloat16_is_summed_in_float32() -> None:
    x, weight = noise(SEQUENCES, TOKENS, CHANNELS).bfloat16(), noise(CHANNELS, KERNEL).bfloat16()
    output, state = short_conv(x, fresh().bfloat16(), weight)
    assert output.dtype == state.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected(x.float(), weight.float(), None).bfloat16())


def test_ranks_share_each_section_by_itself() -> None:
    sections, weight, bias = [4, 2], noise(CHANNELS, 1, KERNEL, seed=1), noise(CHANNELS, seed=2)
    x, outputs = noise(SEQUENCES, TOKENS, CHANNELS), []
    for rank in range(2):
        ranks = TensorParallel(rank, 2)
        layer = ShortConv(sections, KERNEL, ranks, bias=True, activation=silu)
        for name, wanted in wanted_weights(layer):
            wanted.fill({"weight": weight, "bias": bias}[name], ranks)
        channels = [0, 1, 4] if rank == 0 else [2, 3, 5]
        assert layer.state_shape == (3, KERNEL - 1)
        outputs.append(layer(x[..., channels], fresh()[:, channels]).output)
    found = torch.cat(outputs, -1)[..., [0, 1, 3, 4, 2, 5]]
    torch.testing.assert_close(found, silu(expected(x, weight[:, 0], bias)))
