"""Beside the scheduler: requests with an adapter, and the weights in their chunks' keys.

vLLM finds an adapter's blocks by its name, whatever weights they were computed with. So every
request with an adapter first asks the ranks which weights it has, and waits a step for the answer.
While all that is cached under a name was computed with the same weights, these are part of the
keys. Once a name has stood for two, or for some that nobody knows, its blocks may be of either:
requests with it are not offloaded until vLLM has thrown its prefix cache away.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.engines.vllm.rank_adapters import UNKNOWN, AdapterReport, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vllm.lora.request import LoRARequest

_PATIENCE_S: Final = 5.0
"""How long a request waits for an answer; ranks that live give it in their next step."""


class AdapterNews(NamedTuple):
    """What the reports of a step mean."""

    is_doubtful: bool
    """Whether what is being stored may have been computed with other weights than its keys say."""
    requests: list[str]
    """The living ones that must not be offloaded any more."""


class _Cached(NamedTuple):
    """What vLLM's prefix cache may hold under a name."""

    weights: bytes
    """The last that were heard of."""
    is_mixed: bool
    """Whether there may be blocks of others."""


class Adapters:
    """Scheduler thread only.

    Args:
        num_ranks: who must agree.
        clock: monotonic seconds.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._cached: dict[str, _Cached] = {}
        """By name; those that have been asked for since the last reset."""
        self._questions: dict[str, Question] = {}
        self._waiting: dict[str, float] = {}
        """Until when, by request."""
        self._names: dict[str, str] = {}
        self._weights: dict[str, bytes] = {}
        """What stands in a request's keys, like the names by request."""
        self._is_doubtful = False
        """Whether a name has come to stand for other weights since the last report."""

    def arrive(self, request_id: str, lora: LoRARequest | None) -> bool:
        """Whether a request needs no answer; else ranks are asked which weights it has."""
        if lora is None:
            return True
        self._names[request_id] = lora.lora_name
        self._waiting[request_id] = self._clock() + _PATIENCE_S
        self._questions[request_id] = Question(
            lora.lora_name,
            lora.lora_int_id,
            lora.lora_path,
            bool(getattr(lora, "load_inplace", False)),
        )
        return False

    def is_waiting(self, request_id: str) -> bool:
        """Whether an answer may still come."""
        if request_id not in self._waiting or request_id in self._weights:
            return False
        return self._clock() < self._waiting[request_id]

    def stop_waiting(self, request_id: str) -> bool:
        """Go on with what is known; False: it did not wait."""
        self._questions.pop(request_id, None)
        if self._waiting.pop(request_id, None) is None:
            return False
        if request_id not in self._weights:  # what it computes, nobody knows
            self._weights[request_id] = UNKNOWN
            self._note(self._names[request_id], UNKNOWN)
        return True

    def weights_of(self, request_id: str) -> bytes | None:
        """What stands in a request's keys; None: nobody knows what should."""
        name = self._names.get(request_id)
        if name is None:
            return b""
        if name not in self._cached or self._cached[name].is_mixed:
            return None
        return self._weights.get(request_id) or None

    def take_questions(self) -> dict[str, Question]:
        """Hand over what ranks shall answer."""
        questions, self._questions = self._questions, {}
        return questions

    def report(self, by_rank: Collection[AdapterReport | None]) -> AdapterNews:
        """Take in the reports of a step."""
        told = [report for report in by_rank if report is not None]
        for request_id in _all_keys(report.answers for report in told):
            if request_id in self._waiting:
                weights = self._agreed([report.answers.get(request_id) for report in told])
                self._weights[request_id] = weights
                self._note(self._names[request_id], weights)
        for name in _all_keys(report.loaded for report in told):
            self._note(name, self._agreed([report.loaded.get(name) for report in told]))
        is_doubtful, self._is_doubtful = self._is_doubtful, False
        return AdapterNews(is_doubtful, self._take_doubtful() if is_doubtful else [])

    def finish(self, request_id: str) -> bool:
        """A request ended; whether it did while it was waiting."""
        self._questions.pop(request_id, None)
        self._names.pop(request_id, None)
        self._weights.pop(request_id, None)
        return self._waiting.pop(request_id, None) is not None

    def reset(self) -> None:
        """The prefix cache of vLLM is empty; requests that live fill it anew."""
        living = set(self._names.values())
        self._cached = {
            name: _Cached(cached.weights, is_mixed=cached.weights == UNKNOWN)
            for name, cached in self._cached.items()
            if name in living
        }

    def _note(self, name: str, weights: bytes) -> None:
        """From now on requests with this name compute with these weights."""
        cached = self._cached.get(name, _Cached(weights, is_mixed=weights == UNKNOWN))
        is_change = cached.weights != weights
        self._is_doubtful |= is_change and not cached.is_mixed
        self._cached[name] = _Cached(weights, cached.is_mixed or is_change)

    def _take_doubtful(self) -> list[str]:
        """The requests that went on with weights that do not count any more."""
        doubtful = [
            request_id
            for request_id, weights in self._weights.items()
            if weights != UNKNOWN and self._cached[self._names[request_id]].is_mixed
        ]
        self._weights.update(dict.fromkeys(doubtful, UNKNOWN))
        return [request_id for request_id in doubtful if request_id not in self._waiting]

    def _agreed(self, answers: list[bytes | None]) -> bytes:
        """What all ranks say."""
        if len(answers) != self._num_ranks or len(set(answers)) != 1:
            return UNKNOWN
        return answers[0] or UNKNOWN


def _all_keys(mappings: Iterable[Mapping[str, bytes]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
