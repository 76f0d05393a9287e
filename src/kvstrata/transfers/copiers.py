"""Which way caches and arena are copied between: the one place that knows all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.transfers.copy_queue import OneByOne
from kvstrata.transfers.native_copier import NativeCopier, native_calls
from kvstrata.transfers.plain_copier import PlainCopier

if TYPE_CHECKING:
    from kvstrata.tiers.host_arena import HostArena
    from kvstrata.transfers.cache_views import CacheViews
    from kvstrata.transfers.copy_queue import Copier


def make_copier(views: CacheViews, arena: HostArena) -> Copier:
    """The fastest way for caches where they are."""
    if views.device.type == "cuda":
        from kvstrata.transfers.cuda_copier import CudaCopier, make_rows  # noqa: PLC0415

        return CudaCopier(views, make_rows(views, arena))
    calls = native_calls()
    if calls is not None:
        return OneByOne(NativeCopier(views, arena, calls))
    return OneByOne(PlainCopier(views, arena))
