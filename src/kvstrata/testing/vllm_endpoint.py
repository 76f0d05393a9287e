"""What a vLLM API server is asked over HTTP: completions, numbers, resets.

Ownership: everything may be called from any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata.showcase.local_servers import HOST
from kvstrata.testing.vllm_metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MODEL_NAME: Final = "tiny"
_ANSWER_WITHIN_S: Final = 120.0
_NUM_LOGPROBS: Final = 20
"""As many as vLLM gives."""
_JSON: Final = {"Content-Type": "application/json"}


class ServerError(RuntimeError):
    """A server ended, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, and what the server says of it."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Of the likeliest tokens, for each token of the answer."""
    cached_tokens: int
    """Tokens of the prompt that were not computed."""
    seconds: float


class VllmEndpoint:
    """One API server on a loopback port; prompts and answers are token ids.

    Args:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, prompt: Sequence[int], max_tokens: int = 6) -> Completion:
        """Ask for exactly so many tokens, the likeliest each.

        Raises:
            ServerError: it answers with an error.
            OSError: it does not answer.
        """
        start = time.monotonic()
        with self._asked("POST", "/v1/completions", _question(prompt, max_tokens)) as response:
            answer = json.loads(response.read())
        return _completion(answer, time.monotonic() - start)

    def ask_and_leave(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        """Ask for a stream, and hang up after some time, however far the answer is."""
        question = json.dumps(_question(prompt, max_tokens) | {"stream": True})
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_ANSWER_WITHIN_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", question, _JSON)
            time.sleep(after_s)

    def metrics(self) -> Metrics:
        """Its numbers."""
        with self._asked("GET", "/metrics") as response:
            return Metrics(response.read().decode())

    def has_reset(self, *, including: str = "device") -> bool:
        """Forget the device's cache, or with "external" the connector's too; whether it could.

        It cannot while somebody holds a block.
        """
        query = "?reset_external=true" if including == "external" else ""
        with self._asked("POST", f"/reset_prefix_cache{query}") as response:
            return bool(json.loads(response.read())["success"])

    def is_quiet(self) -> bool:
        """Whether no request and none of the connector's jobs is under way."""
        metrics = self.metrics()
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kvstrata_pending")
        return not any(metrics.total(name) for name in busy)

    def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            with self._asked("GET", "/health"):
                return True
        except (OSError, http.client.HTTPException, ServerError):
            return False

    @contextlib.contextmanager
    def _asked(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_ANSWER_WITHIN_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(verb, path, text, _JSON)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerError(f"{path}: {response.status} {response.read().decode()[:2000]}")
            yield response
        finally:
            connection.close()


def _question(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": _NUM_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _completion(answer: dict[str, Any], seconds: float) -> Completion:
    [choice] = answer["choices"]
    if choice["finish_reason"] != "length":
        raise ServerError(f"an answer ended with {choice['finish_reason']!r}")
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Completion(
        choice["token_ids"],
        [
            {int(token.removeprefix("token_id:")): value for token, value in step.items()}
            for step in choice["logprobs"]["top_logprobs"]
        ],
        details.get("cached_tokens") or 0,
        seconds,
    )
