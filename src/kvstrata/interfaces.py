"""The seams of kvstrata, on one page: what others may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.lookups import LookupCodes


class ChunkIndex(Protocol):
    """Knows which chunks exist, without their bytes. Scheduler thread only."""

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupCodes:
        """What is known about each key, in the order asked. Never blocks. Changes nothing."""
        ...
