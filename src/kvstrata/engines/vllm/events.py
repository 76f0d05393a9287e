"""Our events as vLLM's publisher and its readers expect them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstrata.core.ids import GroupId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.engines.vllm.layout import GroupMap


def events_for_vllm(events: Sequence[object], groups: GroupMap) -> Sequence[object]:
    """The same events, with vLLM's numbers of groups."""
    if groups.is_identity:
        return events
    return [_renumbered(event, groups) for event in events]


def _renumbered(event: object, groups: GroupMap) -> object:
    ours = getattr(event, "group_idx", None)
    if ours is None or not isinstance(event, msgspec.Struct):
        return event
    return msgspec.structs.replace(event, group_idx=groups.theirs(GroupId(ours)))
