"""Reads notices of preemption, whatever form an engine gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_NAMES: Final = ("preempted_req_ids", "preempted")


def preempted_ids(notice: object) -> frozenset[str]:
    """The requests that lost their blocks.

    Args:
        notice: ids, or metadata that has them as `preempted_req_ids` or `preempted`; None: none.

    Raises:
        TypeError: the notice has neither form.
    """
    ids = next((getattr(notice, name) for name in _NAMES if hasattr(notice, name)), notice)
    if ids is None:
        return frozenset()
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise TypeError(
            f"a notice of preemption is {type(notice).__name__}; accepted: request ids, or an "
            f"object with {' or '.join(_NAMES)}"
        )
    return frozenset(ids)
