"""vLLM as its users run it: an API server with its processes, asked over HTTP.

Nothing of vLLM is imported here; it is started with the Python that runs the tests.

Ownership: `start` and `stop` belong to one thread; everything else may be called from any.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from kvstrata.showcase.local_servers import HOST, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from prometheus_client.samples import Sample

_READY_WITHIN_S: Final = 240.0
_STOPPED_WITHIN_S: Final = 15.0
_ANSWER_WITHIN_S: Final = 120.0
_POLL_S: Final = 0.1
_NUM_LOGPROBS: Final = 20
"""As many as vLLM gives."""
_EXAM_TOKENS: Final = 12
_MODEL: Final = "tiny"
_JSON: Final = {"Content-Type": "application/json"}
_CHANGES: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "qwen3_next": {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "dtype": "bfloat16",
    },
}
"""What vLLM's CPU kernels want of a tiny model. Batches do not change the answers of these. The
states of Qwen3-Next are small, and so are its blocks, which are as large.
"""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""One thread, a gibibyte of cache at most, and the endpoint that resets caches."""


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


class Metrics:
    """What `/metrics` said at one time.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """A sum over everything that has the name and these labels; 0 if there is nothing."""
        wanted = labels.items()
        found = (s.value for s in self.samples if s.name == name and wanted <= s.labels.items())
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        values = {s.labels[label] for s in self.samples if s.name == name}
        return {value: self.total(name, **{label: value}) for value in sorted(values)}


class VllmServer:
    """One API server with its engine, on a free loopback port.

    Args:
        model: a checkpoint; prompts and answers are token ids, so it needs no tokenizer.
        log: a file for what it prints.
        settings: the connector's; None: without a connector.
        options: as on the command line.
        environment: changes to this process's.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._port = free_port()
        self._command = [*_command(model, self._port), *_transfer(settings), *options]
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that it has printed, over restarts."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def tracebacks(self) -> list[str]:
        """Lines where a traceback starts, but for warnings: vLLM misses a tokenizer in one."""
        lines = self.log.splitlines()
        return [line for line in lines if "Traceback (" in line and " WARNING " not in line]

    @property
    def is_running(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start it; does not wait until it answers."""
        assert self._process is None, "it runs already"
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the command is this module's own
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ServerError: it ended.
            TimeoutError: it does not answer.
        """
        self.wait_until(self._is_healthy, _READY_WITHIN_S)

    def wait_until(self, is_true: Callable[[], bool], within_s: float = 30.0) -> None:
        """Poll while it runs, until something is true.

        Raises:
            ServerError: it ended.
            TimeoutError: it did not become true.
        """
        give_up = time.monotonic() + within_s
        while not is_true():
            if not self.is_running:
                raise ServerError(f"vLLM has ended: {self.log[-4000:]}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"waited for {within_s:g} s: {self.log[-2000:]}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask it to end, and see to it. Does nothing if it does not run."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPPED_WITHIN_S)
                self._let_others_end()
            self.kill()

    def kill(self) -> None:
        """End all its processes at once. Does nothing if it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

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
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_WITHIN_S)
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

    def settle(self) -> None:
        """Wait until it is quiet."""
        self.wait_until(self.is_quiet)

    def _let_others_end(self) -> None:
        """Wait for the rest of its processes: the last one gives shared memory back."""
        assert self._process is not None
        give_up = time.monotonic() + _STOPPED_WITHIN_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < give_up:
                os.killpg(self._process.pid, 0)
                time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with self._asked("GET", "/health"):
                return True
        except (OSError, http.client.HTTPException, ServerError):
            return False

    @contextlib.contextmanager
    def _asked(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_WITHIN_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(verb, path, text, _JSON)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerError(f"{path}: {response.status} {response.read().decode()[:2000]}")
            yield response
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Exam:
    """Prompts, and what vLLM answers to them without a connector."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, plain: VllmServer, prompts: list[list[int]]) -> Exam:
        """Find out what a server without a connector answers."""
        answers = [plain.ask(prompt, _EXAM_TOKENS).tokens for prompt in prompts]
        assert len(set(map(tuple, answers))) == len(answers), "prompts do not matter"
        return cls(prompts, answers)

    def take(self, server: VllmServer, *numbers: int) -> list[int]:
        """Ask a server some of them, one by one; the tokens of each that were not computed."""
        completions = [server.ask(self.prompts[n], _EXAM_TOKENS) for n in numbers]
        assert [c.tokens for c in completions] == [self.answers[n] for n in numbers]
        return [c.cached_tokens for c in completions]


def make_checkpoint(arch: str, folder: Path) -> None:
    """Write a tiny model that vLLM runs on a CPU."""
    from kvstrata.engine.tiny import make_tiny  # noqa: PLC0415 - loads torch

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    make_tiny(arch, folder, **(sizes | ends | _CHANGES[arch]))


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[None]:
    """Start servers side by side, and stop them whatever happens."""
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.stop()


def _command(model: Path, port: int) -> list[str]:
    options = {
        "--host": HOST,
        "--port": str(port),
        "--model": str(model),
        "--served-model-name": _MODEL,
        "--max-model-len": "2048",
        "--seed": "0",
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
    words = [word for option in options.items() for word in option]
    words += ["--dtype", json.loads((model / "config.json").read_text())["dtype"]]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


def _transfer(settings: Mapping[str, Any] | None) -> list[str]:
    if settings is None:
        return []
    config = {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    return ["--kv-transfer-config", json.dumps(config)]


def _question(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": _MODEL,
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
