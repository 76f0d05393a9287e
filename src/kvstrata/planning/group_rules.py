"""What a hit of N tokens needs from each kind of group.

For a prefix of N tokens to be usable every group must be valid at N:

    full       all chunks that touch [local, N)
    window     all chunks that touch [N - window + 1, N), those before `local` excepted
    recurrent  the state taken at exactly N

`local` tokens are on the device already, in every group; nothing is needed for them. The chunks of
a draft group must match one margin past N as well; they are not loaded for it.

Each rule answers two questions, both cheap: the longest valid length up to a given one, and which
chunks to load for a length. Valid lengths are not downward closed, so callers search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstrata.core.layout import GroupKind
from kvstrata.core.lookups import READY_BYTE, ChunkLookup, LookupCodes
from kvstrata.core.spans import ChunkSpan, Span, TokenSpan, floor_to, whole_units

if TYPE_CHECKING:
    from kvstrata.core.chunk_grid import GroupChunks


class GroupRule(Protocol):
    """One group's view of one request's look-ups."""

    @property
    def chunks(self) -> GroupChunks:
        """The group's chunks."""
        ...

    def longest_valid(self, length: int) -> int:
        """The longest valid length up to `length`; `local` when there is none above it."""
        ...

    def blocking_chunk(self, length: int) -> int | None:
        """A chunk that is needed at `length` and not ready; None when no chunk is to blame."""
        ...

    def needed(self, length: int) -> TokenSpan:
        """The tokens whose chunks are needed for a hit of `length`."""
        ...


class FullRule(NamedTuple):
    """Everything from the local hit up to N."""

    chunks: GroupChunks
    local: int
    first_missing: int
    """The first chunk from the local hit on that is not ready."""
    margin: int

    def longest_valid(self, length: int) -> int:
        """As far as chunks are ready without a gap."""
        limit = self.first_missing * self.chunks.chunk_tokens - self.margin
        return max(self.local, min(length, limit))

    def blocking_chunk(self, length: int) -> int | None:
        """The end of the gapless part, unless `length` lies within it."""
        return None if self.longest_valid(length) == length else self.first_missing

    def needed(self, length: int) -> TokenSpan:
        """All tokens that are not on the device."""
        return TokenSpan(self.local, length)


class WindowRule(NamedTuple):
    """The chunks that touch the last positions before N."""

    chunks: GroupChunks
    local: int
    codes: LookupCodes
    window: int
    margin: int

    def longest_valid(self, length: int) -> int:
        """The last length up to `length` whose window is ready."""
        size = self.chunks.chunk_tokens
        while (missing := self.blocking_chunk(length)) is not None:
            # Each length that ends above the last ready chunk below needs a chunk that is missing.
            ready = self.codes.rfind(READY_BYTE, 0, missing)
            length = (ready + 1) * size - self.margin
        return max(self.local, length)

    def blocking_chunk(self, length: int) -> int | None:
        """The last chunk needed at `length` that is not ready."""
        if length <= self.local:
            return None
        needed = self._matched(length).chunks(self.chunks.chunk_tokens)
        if needed.stop > len(self.codes):
            return needed.stop - 1
        last = len(self.codes[needed.start : needed.stop].rstrip(READY_BYTE)) - 1
        return None if last < 0 else needed.start + last

    def needed(self, length: int) -> TokenSpan:
        """The window before `length`, as far as it is not on the device."""
        start = max(self.local, length - self.window + 1)
        return TokenSpan(min(start, length), length)

    def _matched(self, length: int) -> TokenSpan:
        needed = self.needed(length)
        return TokenSpan(needed.start, needed.stop + self.margin)


class RecurrentRule(NamedTuple):
    """One state, at exactly N."""

    chunks: GroupChunks
    local: int
    codes: LookupCodes

    def longest_valid(self, length: int) -> int:
        """The last boundary up to `length` with a state."""
        size = self.chunks.chunk_tokens
        last = self.codes.rfind(READY_BYTE, 0, whole_units(length, size))
        return max(self.local, (last + 1) * size)

    def blocking_chunk(self, length: int) -> int | None:
        """The state at the last boundary up to `length`, unless it is ready."""
        boundary = floor_to(length, self.chunks.chunk_tokens)
        if boundary <= self.local:
            return None
        index = self.chunks.chunk_ending_at(boundary)
        is_ready = index < len(self.codes) and self.codes[index] == ChunkLookup.READY
        return None if is_ready else index

    def needed(self, length: int) -> TokenSpan:
        """The tokens of the chunk whose state is taken at `length`."""
        size = self.chunks.chunk_tokens
        return TokenSpan(max(0, length - size), length)


def rule_for(chunks: GroupChunks, codes: LookupCodes, local: int) -> GroupRule:
    """The rule of a group's kind, over the group's look-ups."""
    group, margin = chunks.group, chunks.margin_tokens
    if group.kind is GroupKind.RECURRENT:
        return RecurrentRule(chunks, local, codes)
    if group.window_tokens is not None:
        return WindowRule(chunks, local, codes, group.window_tokens, margin)
    first = whole_units(local, chunks.chunk_tokens)
    ready = codes[first:]
    first_missing = first + len(ready) - len(ready.lstrip(READY_BYTE))
    return FullRule(chunks, local, first_missing, margin)


def needed_chunks(rule: GroupRule, length: int) -> ChunkSpan:
    """The chunks to load for a hit of `length`."""
    return rule.needed(length).chunks(rule.chunks.chunk_tokens)


def lengths_reading(chunks: GroupChunks, index: int) -> Span:
    """The hit lengths for which a window group needs chunk `index`."""
    tokens, margin = chunks.tokens(index), chunks.margin_tokens
    window = chunks.group.window_tokens or 1
    first = max(1, tokens.start + 1 - margin)
    return Span(first, tokens.stop + window - 1 if chunks.is_ever_needed else first)
