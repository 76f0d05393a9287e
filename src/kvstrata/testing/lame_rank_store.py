"""A directory in which one rank cannot write what lies beyond some token.

Named in a configuration as `{kind: custom, store:
"kvstrata.testing.lame_rank_store:LameRankStore", options: {path: ..., rank: 1, most_tokens: 64}}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.config.units import ByteSize
from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierUnavailable
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.wrapping import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.config.schema import CustomTierConfig
    from kvstrata.core.chunk_label import ChunkBuffer, Namespace, Rank
    from kvstrata.core.outcomes import Deadline


class LameRankStore(WrappedStore):
    """A filesystem store that one rank can write only a part of.

    Args:
        config: `options` has path, rank and most_tokens.
        namespace: whose chunks.
        rank: whose part of them.
    """

    def __init__(self, config: CustomTierConfig, namespace: Namespace, rank: Rank) -> None:
        options: dict[str, Any] = dict(config.options)
        self._is_lame = rank.index == options.pop("rank")
        self._most_tokens = int(options.pop("most_tokens"))
        settings = FilesystemTierConfig(**options, name=config.name, min_free=ByteSize(0))
        super().__init__(FilesystemStore(settings, namespace, rank))

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        """Write what does not end beyond the limit."""
        far = [
            c.label.key for c in chunks if self._is_lame and c.label.tokens.stop > self._most_tokens
        ]
        near = [chunk for chunk in chunks if chunk.label.key not in far]
        error = TierUnavailable("lame", "made to fail", far)
        return super().write(near, deadline).merged(TierOutcome.all_failed(far, error))
