"""A directory whose calls fail, hang and lie at random, for soak runs.

Named in a configuration as `{kind: custom, store: "kvstrata.testing.faulty_store:FaultyStore",
options: {path: ..., fault_share: 0.1, seed: 1}}`.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.config.units import ByteSize
from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierError, TierUnavailable
from kvstrata.testing.faults import flip_payload_bit
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.wrapping import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.config.schema import CustomTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline


class FaultyStore(WrappedStore):
    """A filesystem store that is not to be trusted.

    Of its calls a share fails, hangs for a while, loses what it wrote, or damages it.

    Args:
        config: `options` has path, fault_share, hang_s, seed, and settings of the filesystem tier.
        namespace: whose chunks.
        rank: whose part of them.
    """

    def __init__(self, config: CustomTierConfig, namespace: Namespace, rank: Rank) -> None:
        options: dict[str, Any] = dict(config.options)
        self._share = float(options.pop("fault_share", 0.1))
        self._hang_s = float(options.pop("hang_s", 0.3))
        self._random = random.Random(int(options.pop("seed", 0)) * 1000 + rank.index)  # noqa: S311
        self._mutex = threading.Lock()
        self._path = Path(options["path"])
        options["min_free"] = ByteSize(0)
        super().__init__(
            FilesystemStore(FilesystemTierConfig(**options, name=config.name), namespace, rank)
        )

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Read, or fail."""
        failed = self._fault([chunk.label.key for chunk in chunks])
        return failed or super().read(chunks, deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Write, or fail, or write and damage."""
        failed = self._fault([chunk.label.key for chunk in chunks])
        if failed:
            return failed
        outcome = super().write(chunks, deadline)
        if self._is_time(self._share / 4):
            self._damage(outcome)
        return outcome

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        """Find, or fail."""
        return self._fault(keys) or super().find(keys, deadline)

    def _is_time(self, share: float) -> bool:
        with self._mutex:
            return self._random.random() < share

    def _fault(self, keys: Sequence[ChunkKey]) -> TierOutcome | None:
        if self._is_time(self._share / 10):
            time.sleep(self._hang_s)
        if not self._is_time(self._share):
            return None
        error: TierError = TierUnavailable("faulty", "a fault on purpose", keys)
        return TierOutcome.all_failed(keys, error)

    def _damage(self, outcome: TierOutcome) -> None:
        """Flip a bit of what was just written."""
        for key in outcome.done:
            for path in self._path.glob(f"namespaces/*/*/{key.hex()}.*"):
                with self._mutex:
                    raw = flip_payload_bit(path.read_bytes(), self._random)
                path.write_bytes(raw)
