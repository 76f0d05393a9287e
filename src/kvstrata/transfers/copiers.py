"""Which way caches and arena are copied between: the one place that knows all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.transfers.copy_queue import CopyQueue, OneByOne
from kvstrata.transfers.native_queue import NativeQueue, native_rows
from kvstrata.transfers.plain_copier import PlainCopier

if TYPE_CHECKING:
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import Copier, Copies


def make_queue(views: CacheViews, arena: HostArena) -> Copies:
    """The fastest way for caches where they are."""
    make_rows = native_rows() if views.device.type == "cpu" else None
    if make_rows is not None:
        return NativeQueue(views, arena, make_rows)
    return CopyQueue(make_copier(views, arena))


def make_copier(views: CacheViews, arena: HostArena) -> Copier:
    """What a queue in Python copies with."""
    if views.device.type == "cuda":
        from kvstrata.transfers.cuda_copier import CudaCopier, make_rows  # noqa: PLC0415

        return CudaCopier(views, make_rows(views, arena))
    return OneByOne(PlainCopier(views, arena))
