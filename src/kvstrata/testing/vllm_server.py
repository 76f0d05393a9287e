"""vLLM as its users run it: an API server with its processes.

Nothing of vLLM is imported here; it is started with the Python that runs the tests.

Ownership: `launch`, `stop` and `kill` belong to one thread; everything else may be called from any.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvstrata.showcase.local_servers import HOST, free_port
from kvstrata.testing.vllm_endpoint import MODEL_NAME, ServerError, VllmEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_READY_WITHIN_S: Final = 240.0
_STOPPED_WITHIN_S: Final = 15.0
_POLL_S: Final = 0.1
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


class VllmServer(VllmEndpoint):
    """One API server with its engine, on a free loopback port.

    Args:
        model: a checkpoint, which needs no tokenizer.
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
        super().__init__(free_port())
        self._log = log
        self._command = [*_command(model, self.port), *_transfer(settings), *options]
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
        self.wait_until(self.is_healthy, _READY_WITHIN_S)

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
        "--served-model-name": MODEL_NAME,
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
