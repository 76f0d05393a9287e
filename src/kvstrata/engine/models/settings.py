"""Checks of what a config.json asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection


def accept(key: str, value: object, accepted: Collection[object]) -> None:
    """Refuse a setting that would change the arithmetic and is not implemented.

    Args:
        key: its name in config.json.
        value: what config.json says.
        accepted: what is implemented.

    Raises:
        ModelError: the value is not among those accepted.
    """
    if value not in accepted:
        expected = ", ".join(repr(one) for one in accepted)
        raise ModelError(f"{key} is {value!r}; accepted: {expected}")
