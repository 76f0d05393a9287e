"""A device that remembers which prefix every place of every block really holds.

It stands in for the ranks: no arithmetic, but each step reads what a model's layers would read and
writes what they would write. Reading anything but the right prefix is an error at once. All groups
share the memory of a block, as they do in the engine: a write for one group spoils all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvstrata.core.layout import GroupKind
from kvstrata.engine.cache.block_pool import NULL_BLOCK
from kvstrata.testing.memory_connector import Message, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.core.ids import BlockHash
    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.scheduling.request import Request
    from kvstrata.engine.scheduling.scheduler import Step
    from kvstrata.engine.scheduling.step import ScheduledSequence

VOCABULARY = 3

Node = int
"""A prefix as a number: equal numbers mean equal tokens after equal salts."""


class Truth(NamedTuple):
    """What a request's tokens are, whatever the scheduler thinks."""

    tokens: list[int]
    nodes: list[Node]
    """After n tokens, the prefix is nodes[n]."""


class Truths:
    """The tokens of all requests, and what the names of prefixes stand for.

    Args:
        hash_tokens: tokens per prefix hash.
    """

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._nodes: dict[tuple[Node, object], Node] = {}
        self._of_request: dict[Request, Truth] = {}
        self._of_name: dict[BlockHash, tuple[Truth, int]] = {}

    def __getitem__(self, request: Request) -> Truth:
        return self._of_request[request]

    def begin(self, request: Request, salt: str | None) -> None:
        """A request exists from now on."""
        self._of_request[request] = Truth([], [self._node((0, salt))])
        for token in request.tokens:
            self.append(request, token)
        self.learn_names(request)

    def append(self, request: Request, token: int) -> None:
        """A request has one token more."""
        truth = self._of_request[request]
        truth.tokens.append(token)
        truth.nodes.append(self._node((truth.nodes[-1], token)))

    def learn_names(self, request: Request) -> None:
        """Take over what a request calls its prefixes."""
        for index, name in enumerate(request.hashes):
            self._of_name[name] = (self._of_request[request], (index + 1) * self._hash_tokens)

    def named(self, name: BlockHash) -> Sequence[Node]:
        """The nodes of a prefix, shortest first, from 0 tokens on."""
        truth, end = self._of_name[name]
        return truth.nodes[: end + 1]

    def _node(self, edge: tuple[Node, object]) -> Node:
        return self._nodes.setdefault(edge, len(self._nodes) + 1)


@dataclass
class BlockContent:
    """What one block holds."""

    group_id: int
    prefixes: dict[int, Node] = field(default_factory=dict)
    """By place inside the block; a state has place 0."""

    def copy(self) -> BlockContent:
        """A copy that later writes do not change."""
        return BlockContent(self.group_id, dict(self.prefixes))


class Place(NamedTuple):
    """One place of one block, and the prefix that belongs there."""

    block_id: int
    group_id: int
    offset: int
    node: Node


class FakeDevice:
    """Blocks, and what a step reads and writes of them.

    Args:
        layout: the groups.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.truths = Truths(layout.hash_block_tokens)
        self.blocks: dict[int, BlockContent] = {}
        self._groups = layout.groups

    def compute(self, step: Step) -> dict[str, int]:
        """Compute a step; the tokens that were drawn."""
        pairs = list(zip(step.requests, step.plan.sequences, strict=True))
        for request, sequence in pairs:
            self._check_tokens(request, sequence)
        seen = [[*self._attended(*pair), *self._states_read(*pair)] for pair in pairs]
        made = [list(self._written(*pair)) for pair in pairs]
        _check_apart(seen, made)
        for place in (place for places in seen for place in places):
            self.check(place)
        for place in (place for places in made for place in places):
            self.write(place)
        return {s.request_id: self._draw(r, s.stop) for r, s in pairs if s.sampling is not None}

    def expected(self, name: BlockHash, group_id: int) -> BlockContent:
        """What a block with this name must hold."""
        group = self._groups[group_id]
        size = 1 if group.kind is GroupKind.RECURRENT else group.block_tokens
        return BlockContent(group_id, dict(enumerate(self.truths.named(name)[-size:])))

    def fill(self, tables: Sequence[Sequence[int]], name: BlockHash, start: int) -> None:
        """Put a prefix from token `start` on into a request's blocks."""
        nodes = self.truths.named(name)
        stop = len(nodes) - 1
        for group_id, group in enumerate(self._groups):
            size, table = group.block_tokens, tables[group_id]
            if group.kind is GroupKind.RECURRENT:
                self.write(Place(table[(stop - 1) // size], group_id, 0, nodes[stop]))
                continue
            for t in range(start, stop):
                if table[t // size] != NULL_BLOCK:
                    self.write(Place(table[t // size], group_id, t % size, nodes[t + 1]))

    def check(self, place: Place) -> None:
        """A place must hold what belongs there."""
        assert place.block_id != NULL_BLOCK, f"the null block is read: {place}"
        content = self.blocks.get(place.block_id)
        assert content is not None, f"nothing was ever written to {place}"
        assert content.group_id == place.group_id, f"{content} at {place}"
        assert content.prefixes.get(place.offset) == place.node, f"{content} at {place}"

    def write(self, place: Place) -> None:
        """Put there what belongs there; other groups lose what they had in the block."""
        assert place.block_id != NULL_BLOCK, f"the null block is written: {place}"
        content = self.blocks.get(place.block_id)
        if content is None or content.group_id != place.group_id:
            content = self.blocks[place.block_id] = BlockContent(place.group_id)
        content.prefixes[place.offset] = place.node

    def _check_tokens(self, request: Request, sequence: ScheduledSequence) -> None:
        tokens = self.truths[request].tokens
        assert sequence.token_ids
        assert list(sequence.token_ids) == tokens[sequence.start : sequence.stop]
        assert (sequence.sampling is not None) == (sequence.stop == len(tokens))

    def _attended(self, request: Request, sequence: ScheduledSequence) -> Iterator[Place]:
        """What the new tokens see of the tokens before them."""
        nodes = self.truths[request].nodes
        for group_id, group in enumerate(self._groups):
            if group.kind is GroupKind.RECURRENT:
                continue
            table, size = sequence.tables[group_id], group.block_tokens
            first = 0 if group.window_tokens is None else sequence.start - group.window_tokens + 1
            for t in range(max(0, first), sequence.start):
                yield Place(table[t // size], group_id, t % size, nodes[t + 1])

    def _states_read(self, request: Request, sequence: ScheduledSequence) -> Iterator[Place]:
        nodes, start = self.truths[request].nodes, sequence.start
        for group_id, group in enumerate(self._groups):
            if group.kind is GroupKind.RECURRENT and start:
                block = sequence.tables[group_id][(start - 1) // group.block_tokens]
                yield Place(block, group_id, 0, nodes[start])

    def _written(self, request: Request, sequence: ScheduledSequence) -> Iterator[Place]:
        nodes, stop = self.truths[request].nodes, sequence.stop
        for group_id, group in enumerate(self._groups):
            table, size = sequence.tables[group_id], group.block_tokens
            if group.kind is GroupKind.RECURRENT:
                yield Place(table[(stop - 1) // size], group_id, 0, nodes[stop])
                continue
            for t in range(sequence.start, stop):
                yield Place(table[t // size], group_id, t % size, nodes[t + 1])

    def _draw(self, request: Request, stop: int) -> int:
        """The same token after the same prefix, so that answers can be shared too."""
        token = self.truths[request].nodes[stop] * 7919 % 31 % VOCABULARY
        self.truths.append(request, token)
        return token


class FakeWorker:
    """The worker half of `MemoryScheduler` on a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._payloads: dict[bytes, BlockContent] = {}
        self._message = Message()

    def start_step(self, message: bytes) -> None:
        """Load."""
        self._message = msgspec.msgpack.decode(message, type=Message)
        for copies in self._message.loads.values():
            for copy in copies:
                assert copy.block_id != NULL_BLOCK
                self._device.blocks[copy.block_id] = self._payloads[copy.key].copy()

    def finish_step(self) -> bytes:
        """Store."""
        for copy in self._message.stores:
            self._payloads[copy.key] = self._device.blocks[copy.block_id].copy()
        return msgspec.msgpack.encode(Report(self._message.stores, list(self._message.loads)))


def _check_apart(seen: Sequence[Sequence[Place]], made: Sequence[Sequence[Place]]) -> None:
    """No sequence of a step writes where another one reads or writes."""
    writer_of: dict[int, int] = {}
    for sequence, places in enumerate(made):
        for block in {place.block_id for place in places}:
            assert block not in writer_of, f"two sequences write to block {block}"
            writer_of[block] = sequence
    for sequence, places in enumerate(seen):
        for place in places:
            assert writer_of.get(place.block_id, sequence) == sequence, f"{place} is overwritten"
