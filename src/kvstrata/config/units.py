"""Sizes and times that carry their units: `64GiB`, `10s`.

A bare number is refused, since it would leave the unit to a guess; only zero needs none.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE_UNITS: Final = {
    "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
}  # fmt: skip
_TIME_UNITS: Final = {
    "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1),
    "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400),
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

ACCEPTED_SIZES: Final = "a number with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB), as in 64GiB"
ACCEPTED_TIMES: Final = "a number with a unit (us, ms, s, min, h, d), as in 10s or 250ms"


class ByteSize(int):
    """A number of bytes, written with a unit."""

    @classmethod
    def parse(cls, text: object) -> ByteSize:
        """Read `64GiB`.

        Raises:
            ValueError: says what is accepted.
        """
        return cls(_quantity(text, _SIZE_UNITS, "a size", ACCEPTED_SIZES))

    def __str__(self) -> str:
        """As it would be written: the largest unit that is exact."""
        by_size = sorted(_SIZE_UNITS.items(), key=lambda entry: -entry[1])
        exact = ((int(self) // size, unit) for unit, size in by_size if self % size == 0)
        number, unit = next(exact) if self else (0, "B")
        return f"{number}{unit}"


class Duration(float):
    """A number of seconds, written with a unit."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read `10s`.

        Raises:
            ValueError: says what is accepted.
        """
        seconds = float(_quantity(text, _TIME_UNITS, "a time", ACCEPTED_TIMES))
        if not math.isfinite(seconds):
            raise ValueError(f"{text!r} is too long; accepted: {ACCEPTED_TIMES}")
        return cls(seconds)

    def __str__(self) -> str:
        """As it would be written: the largest unit that is exact."""
        micros = round(self * 10**6)
        for unit, seconds in reversed(_TIME_UNITS.items()):
            if micros and micros % round(seconds * 10**6) == 0:
                return f"{micros // round(seconds * 10**6)}{unit}"
        return f"{float(self):g}s"


def size(text: str) -> Any:  # noqa: ANN401 - a field's default has the field's type
    """The default of a size setting."""
    return msgspec.field(default_factory=lambda: ByteSize.parse(text))


def duration(text: str) -> Any:  # noqa: ANN401
    """The default of a time setting."""
    return msgspec.field(default_factory=lambda: Duration.parse(text))


def _quantity(
    text: object, units: Mapping[str, int | Decimal], noun: str, accepted: str
) -> Decimal:
    """A number times its unit; only zero needs none."""
    found = _QUANTITY.fullmatch(str(text)) if isinstance(text, str | int) else None
    if found is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is not understood; accepted: {accepted}")
    number, unit = Decimal(found[1]), found[2]
    if number == 0 and not unit:
        return number
    if unit not in units:
        raise ValueError(f"{text!r} is not {noun}; accepted: {accepted}")
    return number * units[unit]
