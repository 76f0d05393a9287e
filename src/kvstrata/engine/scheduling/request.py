"""One request, from its arrival to its end."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvstrata.core.hashing import ExtraKeys, PrefixHasher
from kvstrata.runtime.seam import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import BlockHash
    from kvstrata.core.layout import KVLayout
    from kvstrata.engine.cache.group_tables import GroupTable
    from kvstrata.engine.scheduling.step import SamplingParams


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """It has no blocks."""
    LOADING = "loading"
    """It has blocks that a connector fills."""
    RUNNING = "running"
    """It has blocks and takes part in steps."""
    ENDED = "ended"


class FinishReason(StrEnum):
    """Why an answer ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"


class Request:
    """Tokens, progress and blocks of one request.

    Ownership: scheduler thread only.

    Args:
        request_id: unique among living requests.
        prompt: its tokens.
        sampling: how answers are drawn.
        layout: for the size of hash blocks.
        cache_salt: only requests with the same salt share cache entries.
        limits: what it may ask of a connector.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        layout: KVLayout,
        cache_salt: str | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.limits = limits or RequestLimits()
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.tables: tuple[GroupTable, ...] = ()
        self.computed = 0
        """Tokens whose cache entries are there."""
        self.loaded = 0
        """LOADING: tokens that will be there when the load is done."""
        self.local_hit_tokens = 0
        self.external_hit_tokens = 0
        self.num_failed_loads = 0
        self.num_preemptions = 0
        self._hasher = PrefixHasher(layout.hash_block_tokens, ExtraKeys(cache_salt=cache_salt))
        self._hasher.extend(self.tokens)

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """One per complete hash block; grows with the request."""
        return self._hasher.hashes

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.num_prompt_tokens :]

    def append(self, token: int) -> None:
        """Take a drawn token; the answer may end with it."""
        self.tokens.append(token)
        self._hasher.extend((token,))
        if token in self.sampling.stop_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) - self.num_prompt_tokens >= self.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
