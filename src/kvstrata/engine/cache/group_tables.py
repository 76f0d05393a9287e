"""One request's blocks in one group, by the rule of the group's kind.

Position i of a table stands for the tokens [i * block_tokens, (i + 1) * block_tokens):

    full        every position has a block
    window      positions that no later token sees have the null block
    recurrent   the state after n tokens rests at the position of token n - 1; other positions have
                the null block

Tables only say which blocks they need or no longer need; the pool hands them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.core.layout import GroupKind
from kvstrata.core.spans import ceil_div, whole_units
from kvstrata.engine.cache.block_pool import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.core.layout import KVGroup


class GroupTable:
    """A table of any kind; kinds differ in what they keep.

    Args:
        group: the group's geometry.
        blocks: those of a prefix hit.
    """

    def __init__(self, group: KVGroup, blocks: Sequence[int] = ()) -> None:
        self.blocks = list(blocks)
        self.block_tokens = group.block_tokens
        self._num_dropped = 0
        """Positions before this one have been given up."""

    @property
    def covered_tokens(self) -> int:
        """Tokens that can be computed without another block."""
        return len(self.blocks) * self.block_tokens

    def num_missing(self, stop: int) -> int:
        """Blocks to take before the tokens up to `stop` can be computed or loaded."""
        return max(0, ceil_div(stop, self.block_tokens) - len(self.blocks))

    def grow(self, stop: int, fresh: Iterator[int]) -> None:
        """Take the missing blocks out of `fresh`."""
        self.blocks.extend(next(fresh) for _ in range(self.num_missing(stop)))

    def skip_unseen(self, loaded: int) -> None:
        """Before a load of so many tokens: positions that nothing after it sees need no block."""
        skipped = min(self._first_seen(loaded), ceil_div(loaded, self.block_tokens))
        self.blocks.extend([NULL_BLOCK] * (skipped - len(self.blocks)))

    def drop_unseen(self, computed: int) -> list[int]:
        """Give up the blocks that nothing after `computed` tokens needs."""
        stop = min(self._first_seen(computed), len(self.blocks))
        positions = range(self._num_dropped, stop)
        dropped = [self.blocks[p] for p in positions if self.blocks[p] != NULL_BLOCK]
        for position in positions:
            self.blocks[position] = NULL_BLOCK
        self._num_dropped = max(self._num_dropped, stop)
        return dropped

    def completed(self, before: int, computed: int) -> range:
        """The positions that became final between two numbers of computed tokens."""
        return range(before // self.block_tokens, computed // self.block_tokens)

    def _first_seen(self, computed: int) -> int:
        """The first position that something after `computed` tokens needs."""
        raise NotImplementedError


class FullTable(GroupTable):
    """Every later token sees all."""

    def _first_seen(self, computed: int) -> int:  # noqa: ARG002 - it does not matter here
        return 0


class WindowTable(GroupTable):
    """A later token sees its window."""

    def __init__(self, group: KVGroup, blocks: Sequence[int] = ()) -> None:
        super().__init__(group, blocks)
        self._window = group.window_tokens or 1

    def _first_seen(self, computed: int) -> int:
        return whole_units(max(0, computed - self._window + 1), self.block_tokens)


class StateTable(GroupTable):
    """A later token needs the last state; a step makes one, at its end."""

    def num_missing(self, stop: int) -> int:
        """One, if the new state rests at a new position."""
        return min(1, super().num_missing(stop))

    def grow(self, stop: int, fresh: Iterator[int]) -> None:
        """Take a block for the new state; the positions between have none."""
        if self.num_missing(stop):
            between = ceil_div(stop, self.block_tokens) - len(self.blocks) - 1
            self.blocks.extend([NULL_BLOCK] * between)
            self.blocks.append(next(fresh))

    def completed(self, before: int, computed: int) -> range:
        """The last position, if its state was taken at its end."""
        is_at_end = computed > before and computed % self.block_tokens == 0
        last = whole_units(computed, self.block_tokens)
        return range(last - 1, last) if is_at_end else range(0)

    def _first_seen(self, computed: int) -> int:
        return whole_units(computed - 1, self.block_tokens) if computed else 0


_TABLES: Final = {
    GroupKind.FULL: FullTable,
    GroupKind.WINDOW: WindowTable,
    GroupKind.RECURRENT: StateTable,
}


def make_table(group: KVGroup, blocks: Sequence[int] = ()) -> GroupTable:
    """A table of a group's kind, with the blocks of a prefix hit."""
    return _TABLES[group.kind](group, blocks)
