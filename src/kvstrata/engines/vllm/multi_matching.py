"""The hooks from a request's arrival until it has blocks, for several connectors as one.

    get_num_new_matched_tokens  every child is asked; the highest tokens * load_weight wins
    update_state_after_alloc    the winner loads; the others hear of the blocks with 0 tokens

Scheduler thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvstrata.engines.several.loads import Load, Loads
from kvstrata.engines.several.rounds import NOTHING, Answer, Room, Rounds, flaw_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from kvstrata.engines.several.guard import GuardedChild
    from kvstrata.engines.vllm.multi_groups import GroupFacts

_GROUP_IDS: Final = "get_loaded_kv_cache_group_ids"
_NULL_BLOCK: Final = 0


class MatchingHooks(KVConnectorBase_V1):
    """Who loads a request."""

    def _open_matching(self, children: Sequence[GuardedChild[Any]], groups: GroupFacts) -> None:
        self._children = children
        self._groups = groups
        self._rounds = Rounds(children, time.monotonic)
        self._loads = Loads()

    def on_new_request(self, request: Request) -> None:
        """Tell every child of a request."""
        for child in self._children:
            child.use("on_new_request", lambda c: c.on_new_request(request), None)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the best child can load; None: a child that may be better does not know yet."""
        answers = [
            self._answer(place, request, num_computed_tokens)
            for place in range(len(self._children))
        ]
        stride = self._groups.stride_tokens
        most_tokens = (request.num_tokens - 1) // stride * stride - num_computed_tokens
        said = self._rounds.decide(request.request_id, answers, most_tokens)
        return said.tokens, said.is_async

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The groups that the winner writes as a whole; those that all would, if nobody won."""
        winner = self._rounds.chosen(request.request_id)
        asked = self._children if winner is None else [winner]
        answers = [child.use(_GROUP_IDS, self._groups_of(request), ()) for child in asked]
        return tuple(sorted(set(answers[0]).intersection(*answers)))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Where the winner has it from."""
        otherwise = super().get_external_cache_hit_sources(request, num_external_tokens)
        winner = self._rounds.chosen(request.request_id)
        if winner is None:
            return otherwise
        return winner.use(
            "get_external_cache_hit_sources",
            lambda c: c.get_external_cache_hit_sources(request, num_external_tokens),
            otherwise,
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The winner loads what vLLM says; the others are told of the blocks alone."""
        winner = self._rounds.take(request.request_id)
        loader = None if winner is None else winner.child
        for child in self._children:
            _tell_blocks(child, request, blocks, num_external_tokens if child is loader else 0)
        if not num_external_tokens:
            return
        name = None if loader is None else loader.name
        load = Load(name, num_external_tokens, _block_ids(blocks))
        if loader is not None:
            loader.tally.loads += 1
        if winner is None or winner.is_async:
            self._loads.start(request.request_id, load)
        else:
            self._loads.start_in_step(load)

    def _answer(self, place: int, request: Request, local_tokens: int) -> Answer:
        """What a child has; an answer that cannot be used is a miss."""
        child = self._children[place]
        if not self._rounds.may_ask(request.request_id, place):
            return NOTHING
        room = Room(request.num_tokens - local_tokens, self._groups.takes_sync_loads)
        answer, flaw = child.use(
            "get_num_new_matched_tokens", _match(request, local_tokens, room), (NOTHING, None)
        )
        if flaw is None:
            return answer
        child.tally.unusable_answers += 1
        child.say_once(flaw)
        return NOTHING

    def _groups_of(self, request: Request) -> Callable[[Any], tuple[int, ...]]:
        def ask(connector: Any) -> tuple[int, ...]:  # noqa: ANN401 - any vLLM connector
            if not hasattr(connector, _GROUP_IDS):
                return self._groups.cacheable_ids
            return tuple(connector.get_loaded_kv_cache_group_ids(request))

        return ask


def _match(
    request: Request, local_tokens: int, room: Room
) -> Callable[[Any], tuple[Answer, str | None]]:
    def ask(connector: Any) -> tuple[Answer, str | None]:  # noqa: ANN401 - any vLLM connector
        tokens, is_async = connector.get_num_new_matched_tokens(request, local_tokens)
        answer = Answer(None if tokens is None else int(tokens), bool(is_async))
        return answer, flaw_of(answer, room)

    return ask


def _tell_blocks(
    child: GuardedChild[Any], request: Request, blocks: KVCacheBlocks, num_tokens: int
) -> None:
    child.use(
        "update_state_after_alloc",
        lambda c: c.update_state_after_alloc(request, blocks, num_tokens),
        None,
    )


def _block_ids(blocks: KVCacheBlocks) -> frozenset[int]:
    """A request's blocks in all groups; a block belongs to one group at a time."""
    return frozenset(i for table in blocks.get_block_ids() for i in table if i != _NULL_BLOCK)
