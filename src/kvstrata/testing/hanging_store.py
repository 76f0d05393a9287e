"""A directory whose calls hang, deadline or not: as a dead network mount does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.config.units import ByteSize
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.wrapping import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.config.schema import CustomTierConfig
    from kvstrata.core.chunk_label import Namespace, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline, TierOutcome


class HangingStore(WrappedStore):
    """Answers questions after a long time.

    Args:
        config: `options` has path and seconds.
        namespace: whose chunks.
        rank: whose part of them.
    """

    def __init__(self, config: CustomTierConfig, namespace: Namespace, rank: Rank) -> None:
        options: dict[str, Any] = dict(config.options)
        self._seconds = float(options.pop("seconds"))
        settings = FilesystemTierConfig(**options, min_free=ByteSize(0), name=config.name)
        super().__init__(FilesystemStore(settings, namespace, rank))

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Hang, then answer."""
        time.sleep(self._seconds)
        return super().find(keys, deadline)
