"""Beside the scheduler: requests with an adapter, and the weights in their chunks' keys.

The ranks know which weights an adapter has. The first request with an adapter waits a step for
their answer; once they have loaded it, later ones do not. When a rank loads other weights under the
same name, what requests compute from then on is not stored under the old ones.

Where ranks cannot tell or do not agree, requests with that adapter are not offloaded. Nothing is
ever stored under weights that it was not computed with. What is loaded is as fresh as vLLM's own
prefix cache: who replaces an adapter's files resets that, and everybody is asked again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstrata.engines.vllm.rank_adapters import UNKNOWN, AdapterReport, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vllm.lora.request import LoRARequest

_K = TypeVar("_K", int, str)

_PATIENCE_S: Final = 5.0
"""How long a request waits for an answer; ranks that live give it in their next step."""


class AdapterNews(NamedTuple):
    """What the reports of a step mean."""

    is_change: bool
    """Whether something under way may have been computed with other weights than its keys say."""
    requests: list[str]
    """The living requests that other weights answer now than before."""


class Adapters:
    """Scheduler thread only.

    Args:
        num_ranks: who must agree.
        clock: monotonic seconds.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._loaded: dict[int, bytes] = {}
        self._named: defaultdict[int, set[bytes]] = defaultdict(set)
        """What requests have had in their keys since an adapter was loaded, also those that have
        ended."""
        self._questions: dict[str, Question] = {}
        self._waiting: dict[str, float] = {}
        """Until when, by request."""
        self._ids: dict[str, int] = {}
        self._weights: dict[str, bytes] = {}
        """By request, like the ids."""

    def arrive(self, request_id: str, lora: LoRARequest | None) -> bool:
        """Whether a request's weights are known; if not, ranks are asked for them."""
        if lora is None:
            return True
        self._ids[request_id] = lora.lora_int_id
        is_loaded_anew = bool(getattr(lora, "load_inplace", False))
        if not is_loaded_anew and lora.lora_int_id in self._loaded:
            self._name(request_id, self._loaded[lora.lora_int_id])
            return True
        self._waiting[request_id] = self._clock() + _PATIENCE_S
        self._questions[request_id] = Question(lora.lora_int_id, lora.lora_path, is_loaded_anew)
        return False

    def is_waiting(self, request_id: str) -> bool:
        """Whether an answer may still come."""
        if request_id not in self._waiting or request_id in self._weights:
            return False
        return self._clock() < self._waiting[request_id]

    def stop_waiting(self, request_id: str) -> bool:
        """Go on with what is known; False: it did not wait."""
        self._questions.pop(request_id, None)
        return self._waiting.pop(request_id, None) is not None

    def weights_of(self, request_id: str) -> bytes | None:
        """What stands in a request's keys; None: nobody knows what should."""
        if request_id not in self._ids:
            return b""
        return self._weights.get(request_id, UNKNOWN) or None

    def take_questions(self) -> dict[str, Question]:
        """Hand over what ranks shall answer."""
        questions, self._questions = self._questions, {}
        return questions

    def report(self, by_rank: Collection[AdapterReport | None]) -> AdapterNews:
        """Take in the reports of a step."""
        told = [report for report in by_rank if report is not None]
        for request_id in _all_keys(report.answers for report in told):
            if request_id in self._waiting:
                self._name(request_id, self._agreed([r.answers.get(request_id) for r in told]))
        news = AdapterNews(is_change=False, requests=[])
        for adapter_id in _all_keys(report.loaded for report in told):
            weights = self._agreed([report.loaded.get(adapter_id) for report in told])
            is_change = bool(self._named[adapter_id] - {weights})
            changed = self._follow(adapter_id, weights)
            news = AdapterNews(news.is_change or is_change, news.requests + changed)
        return news

    def finish(self, request_id: str) -> None:
        """A request ended."""
        self.stop_waiting(request_id)
        self._ids.pop(request_id, None)
        self._weights.pop(request_id, None)

    def forget_loaded(self) -> None:
        """Ask again for every adapter, when its next request arrives."""
        self._loaded.clear()

    def _name(self, request_id: str, weights: bytes) -> None:
        self._weights[request_id] = weights
        self._named[self._ids[request_id]].add(weights)

    def _agreed(self, answers: list[bytes | None]) -> bytes:
        """What all ranks say."""
        if len(answers) != self._num_ranks or len(set(answers)) != 1:
            return UNKNOWN
        return answers[0] or UNKNOWN

    def _follow(self, adapter_id: int, weights: bytes) -> list[str]:
        """An adapter was loaded: the requests for which that is news."""
        self._loaded[adapter_id] = weights
        self._named[adapter_id] = {weights}
        changed = [
            request_id
            for request_id, other in self._weights.items()
            if self._ids[request_id] == adapter_id and other != weights
        ]
        self._weights.update(dict.fromkeys(changed, weights))
        return [request_id for request_id in changed if request_id not in self._waiting]


def _all_keys(mappings: Iterable[Mapping[_K, bytes]]) -> list[_K]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
