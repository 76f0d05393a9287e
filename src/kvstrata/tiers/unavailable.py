"""Stands in for a tier that could not be opened and is not required."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.ids import ChunkKey
    from kvstrata.core.outcomes import Deadline


class UnavailableStore:
    """Fails every call with the reason.

    Args:
        name: the tier's.
        reason: why it could not be opened.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name = name
        self._reason = reason

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:  # noqa: ARG002
        """Fail."""
        return self._fail(chunk.label.key for chunk in chunks)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:  # noqa: ARG002
        """Fail."""
        return self._fail(chunk.label.key for chunk in chunks)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:  # noqa: ARG002
        """Fail."""
        return self._fail(keys)

    def remove(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:  # noqa: ARG002
        """Fail."""
        return self._fail(keys)

    def close(self) -> None:
        """Nothing is open."""

    def _fail(self, keys: Iterable[ChunkKey]) -> TierOutcome:
        keys = list(keys)
        return TierOutcome.all_failed(keys, TierUnavailable(self._name, self._reason, keys))
