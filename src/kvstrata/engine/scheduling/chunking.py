"""How many tokens of a request the next step computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import floor_to

if TYPE_CHECKING:
    from kvstrata.core.layout import KVLayout


def state_stride(layout: KVLayout) -> int | None:
    """States of all recurrent groups can be kept at multiples of this; None: there are none."""
    sizes = _state_sizes(layout)
    return math.lcm(*sizes) if sizes else None


def state_unit(layout: KVLayout) -> int | None:
    """States of any recurrent group can be kept at multiples of this only; None: there are none."""
    sizes = _state_sizes(layout)
    return math.gcd(*sizes) if sizes else None


def _state_sizes(layout: KVLayout) -> list[int]:
    return [g.block_tokens for g in layout.groups if g.kind is GroupKind.RECURRENT]


def next_stop(computed: int, num_tokens: int, budget: int, stride: int | None) -> int:
    """Where a step from `computed` should end, given the tokens known and the budget left.

    A state is kept only where a step ends. So a prefill ends at a multiple of the stride when it
    can, and once before the last token: the longest prefix that the same prompt could use again.
    """
    stop = min(num_tokens, computed + budget)
    if stride is None:
        return stop
    latest = num_tokens - 1 if stop == num_tokens else stop
    aligned = floor_to(latest, stride)
    return aligned if computed < aligned else stop
