"""Whether loading beats recomputing, from speeds that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.2
"""Weight of the newest measurement."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Units per second, smoothed; nothing is known before the first measurement."""

    per_s: float | None = None

    def measured(self, amount: float, seconds: float) -> Speed:
        """Take another measurement in."""
        newest = amount / max(seconds, 1e-9)
        if self.per_s is None:
            return Speed(newest)
        return Speed((1 - _SMOOTHING) * self.per_s + _SMOOTHING * newest)

    def seconds(self, amount: float) -> float | None:
        """How long so much will take; None: not known."""
        return None if not self.per_s else amount / self.per_s


def is_load_worth(
    num_tokens: int, num_bytes: int, *, compute: Speed, copy: Speed, overhead_s: float
) -> bool:
    """Whether to load so many tokens rather than compute them; yes while speeds are not known.

    Args:
        num_tokens: tokens that would be computed otherwise.
        num_bytes: bytes to copy for them.
        compute: tokens computed per second.
        copy: bytes copied per second.
        overhead_s: what a load costs besides its bytes, such as a step of waiting.
    """
    compute_s, copy_s = compute.seconds(num_tokens), copy.seconds(num_bytes)
    if compute_s is None or copy_s is None:
        return True
    return copy_s + overhead_s < compute_s
