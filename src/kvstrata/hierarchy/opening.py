"""From a tier's configuration to a tier in use: stores, threads, breaker, and what is there.

How many calls run at once follows the medium. Files are read one by one, so a device is kept busy
by several threads per core; servers pipeline a batch themselves, so few threads with large batches
serve them best.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.config.schema import CustomTierConfig, FilesystemTierConfig, tier_name
from kvstrata.core.chunk_label import Rank
from kvstrata.hierarchy.breaker import Breaker
from kvstrata.hierarchy.known_chunks import KnownChunks
from kvstrata.hierarchy.lower_tier import LowerTier
from kvstrata.hierarchy.ranks import LocalChannel, RankedTier
from kvstrata.hierarchy.tier_io import TierIO
from kvstrata.tiers.file_index import complete_keys
from kvstrata.tiers.file_layout import StoreDirectory
from kvstrata.tiers.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.config.schema import TierConfig
    from kvstrata.core.chunk_label import Namespace
    from kvstrata.interfaces import ChunkStore
    from kvstrata.tiers.host_arena import HostArena

_THREADS_PER_CORE: Final = 4
_MOST_THREADS: Final = 16


class Traffic(NamedTuple):
    """How calls to a medium are cut and run."""

    num_threads: int
    chunks_per_task: int


_SERVER: Final = Traffic(num_threads=2, chunks_per_task=32)


def open_tier(
    config: TierConfig,
    namespace: Namespace,
    arenas: Sequence[HostArena],
    clock: Callable[[], float],
) -> LowerTier:
    """Open a tier for all ranks whose arenas these are.

    Raises:
        ConfigError: the tier cannot be opened.
    """
    ios = [open_io(config, store) for store in _open_stores(config, namespace, len(arenas))]
    channels = [LocalChannel(io, arena) for io, arena in zip(ios, arenas, strict=True)]
    known = KnownChunks(clock)
    if isinstance(config, FilesystemTierConfig):
        folder = StoreDirectory(Path(config.path)).namespace(namespace.fingerprint)
        with contextlib.suppress(OSError):  # then chunks are asked about one by one
            known.found(complete_keys(folder, len(arenas)))
    ranks = RankedTier(channels)
    return LowerTier(tier_name(config), ranks, Breaker(clock), known, weight=config.weight)


def open_io(config: TierConfig, store: ChunkStore) -> TierIO:
    """Start one rank's threads for a tier's store."""
    traffic = traffic_for(config)
    return TierIO(
        tier_name(config),
        store,
        num_threads=traffic.num_threads,
        chunks_per_task=traffic.chunks_per_task,
    )


def _open_stores(config: TierConfig, namespace: Namespace, num_ranks: int) -> list[ChunkStore]:
    """One store per rank, or none: what was opened before a failure is closed again."""
    with contextlib.ExitStack() as opened:
        stores = []
        for index in range(num_ranks):
            stores.append(open_store(config, namespace, Rank(index, num_ranks)))
            opened.callback(stores[-1].close)
        opened.pop_all()
        return stores


def traffic_for(config: TierConfig) -> Traffic:
    """How many calls to a tier run at once, and how many chunks each has."""
    if not isinstance(config, FilesystemTierConfig | CustomTierConfig):
        return _SERVER
    num_threads = min(_MOST_THREADS, _THREADS_PER_CORE * (os.cpu_count() or 1))
    return Traffic(num_threads, chunks_per_task=1)
