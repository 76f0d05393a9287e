from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout, ParallelLayout, Sharding
from kvstrata.errors import LayoutError
from kvstrata.testing.builders import a_layout, full_group, recurrent_group, window_group

FULL: dict[str, Any] = {
    "kind": GroupKind.FULL,
    "block_tokens": 16,
    "layers": (KVLayer("a", 1024),),
}


def test_group_derives_its_sizes() -> None:
    group = full_group(528, kernel=16, layers=("a", "b"), page_bytes=33 * 64)

    assert group.block_bytes == 2 * 33 * 64
    assert group.cut_tokens == 16
    assert group.rows_per_block == 33


def test_states_lie_at_ends_of_blocks_unless_said_otherwise() -> None:
    assert recurrent_group(528).boundary_tokens == 528
    assert recurrent_group(528, state_tokens=16).boundary_tokens == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 0}, "full group: block_tokens is 0, but must be at least 1"),
        ({"kernel_block_tokens": -16}, "kernel_block_tokens is -16"),
        ({"kernel_block_tokens": 5}, "kernel_block_tokens 5 does not divide block_tokens 16"),
        ({"window_tokens": 128}, "window_tokens is 128, but only window groups have one"),
        ({"state_tokens": 8}, "state_tokens is 8, but only recurrent groups have one"),
        ({"layers": ()}, "it has no layers"),
        ({"layers": (KVLayer("a", 0),)}, "page_bytes of layer 'a' is 0"),
        (
            {"kernel_block_tokens": 4, "layers": (KVLayer("a", 1023),)},
            "page_bytes of layer 'a' is 1023, but must be a positive multiple of 4",
        ),
        ({"kind": GroupKind.WINDOW}, "window group: window_tokens is missing"),
        ({"kind": GroupKind.WINDOW, "window_tokens": 0}, "window_tokens is 0"),
        (
            {"kind": GroupKind.RECURRENT, "window_tokens": 64},
            "recurrent group: window_tokens is 64, but only window groups have one",
        ),
        (
            {"kind": GroupKind.RECURRENT, "kernel_block_tokens": 4},
            "kernel_block_tokens is 4, but a state is one piece",
        ),
        ({"kind": GroupKind.RECURRENT, "state_tokens": 5}, "state_tokens 5 does not divide"),
    ],
)
def test_senseless_groups_are_refused_with_their_values(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        KVGroup(**FULL | changes)


def test_hash_block_must_divide_every_block() -> None:
    with pytest.raises(LayoutError, match=r"hash_block_tokens 32 does not divide .*528.*16 would"):
        a_layout(full_group(32), recurrent_group(528), hash_block=32)
    with pytest.raises(LayoutError, match="does not divide state_tokens 24 of recurrent group 0"):
        a_layout(recurrent_group(48, state_tokens=24), hash_block=16)


@pytest.mark.parametrize("hash_block", [0, -4])
def test_hash_block_must_be_positive(hash_block: int) -> None:
    with pytest.raises(LayoutError, match=f"hash_block_tokens is {hash_block}"):
        KVLayout(groups=(full_group(),), hash_block_tokens=hash_block, dtype="bfloat16")


def test_alignment_is_a_multiple_of_the_hash_block() -> None:
    with pytest.raises(LayoutError, match="hit_alignment_tokens 24 is not a multiple"):
        a_layout(full_group(16), alignment=24)
    with pytest.raises(LayoutError, match="hit_alignment_tokens 0 is not"):
        a_layout(full_group(16), alignment=0)
    assert a_layout(full_group(16)).alignment_tokens == 16
    assert a_layout(full_group(16), alignment=48).alignment_tokens == 48


def test_layouts_without_groups_or_with_a_layer_twice_are_refused() -> None:
    with pytest.raises(LayoutError, match="no groups"):
        KVLayout(groups=(), hash_block_tokens=16, dtype="bfloat16")
    with pytest.raises(LayoutError, match=r"more than one group: \['full'\]"):
        KVLayout(groups=(full_group(), full_group()), hash_block_tokens=16, dtype="bfloat16")


def test_parallel_axes_are_positive_and_multiply() -> None:
    assert ParallelLayout(tensor=2, pipeline=3).num_ranks == 6
    with pytest.raises(LayoutError, match="parallel layout: tensor is 0"):
        ParallelLayout(tensor=0)


def test_hits_can_end_where_every_state_can_exist() -> None:
    layout = a_layout(full_group(784), recurrent_group(528), recurrent_group(1056))

    assert layout.hash_block_tokens == 16
    assert layout.hit_stride_tokens == 1056
    assert a_layout(full_group(784), window_group(64, 48)).hit_stride_tokens == 16


LAYOUT = a_layout(full_group(16), window_group(64, 16), recurrent_group(48))


def changed_group(**changes: Any) -> KVLayout:  # noqa: ANN401 - any field
    return replace(LAYOUT, groups=(replace(LAYOUT.groups[0], **changes), *LAYOUT.groups[1:]))


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, dtype="fp8_e4m3"),
        replace(LAYOUT, hash_block_tokens=8),
        replace(LAYOUT, parallel=ParallelLayout(tensor=2)),
        replace(LAYOUT, groups=LAYOUT.groups[::-1]),
        changed_group(sharding=Sharding.REPLICATED),
        changed_group(is_draft=True),
        changed_group(kernel_block_tokens=8),
        changed_group(layers=(KVLayer("other", 1024),)),
        changed_group(layers=(KVLayer("full.0", 2048),)),
    ],
)
def test_fingerprint_tells_layouts_apart(other: KVLayout) -> None:
    assert other.fingerprint != LAYOUT.fingerprint


def test_fingerprint_ignores_what_does_not_change_bytes() -> None:
    assert replace(LAYOUT, hit_alignment_tokens=48).fingerprint == LAYOUT.fingerprint


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from kvstrata.testing.builders import *;"
        "print(a_layout(full_group(16), window_group(64, 16), recurrent_group(48)).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == LAYOUT.fingerprint
