"""Which way caches and arena are copied between: the one place that knows all of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstrata.transfers.copy_queue import CopyQueue
from kvstrata.transfers.native_queue import NativeQueue, native_rows
from kvstrata.transfers.plain_copier import PlainCopier

if TYPE_CHECKING:
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import Copies
    from kvstrata.transfers.stream_queue import DeviceRows

_log = logging.getLogger(__name__)


def make_queue(views: CacheViews, arena: HostArena) -> Copies:
    """The fastest way for caches where they are."""
    if views.device.type == "cuda":
        from kvstrata.transfers.stream_queue import StreamQueue  # noqa: PLC0415

        return StreamQueue(views, _device_rows(views, arena))
    make_rows = native_rows()
    if make_rows is not None:
        return NativeQueue(views, arena, make_rows)
    return CopyQueue(PlainCopier(views, arena))


def _device_rows(views: CacheViews, arena: HostArena) -> DeviceRows:
    """Straight over the bus where the arena is pinned and Triton is there, else with a buffer."""
    from kvstrata.transfers.staged_rows import StagedRows  # noqa: PLC0415 - one of the two

    if not arena.is_pinned:
        _log.warning(
            "the arena could not be pinned: steps wait for copies to and from %s", views.device
        )
        return StagedRows(views, arena)
    try:
        from kvstrata.transfers.pinned_rows import PinnedRows  # noqa: PLC0415 - needs Triton
    except ImportError:
        return StagedRows(views, arena)
    return PinnedRows(views, arena)
