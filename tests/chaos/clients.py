"""Other processes that use a store: one that obeys, and one that writes until it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvstrata.testing.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECRETS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "anything"}


@dataclass(frozen=True)
class Answer:
    """How a call in another process ended, by chunk number."""

    done: list[int]
    absent: list[int]
    failed: dict[str, str]
    """The error's class."""
    num_wrong: int
    seconds: float


class _Script:
    def __init__(self, name: str, arguments: Sequence[str], wrapper: Sequence[str]) -> None:
        script = str(Path(__file__).with_name(name))
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SECRETS,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._process.args!r} ended"
        return line.strip()


class StoreClient(_Script):
    """A process with a store of its own.

    `settings` are a tier's, as in the configuration; `wrapper` is a command in front, and `uid`
    the user it becomes when it has changed into `folder`.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        wrapper: Sequence[str] = (),
        folder: Path | None = None,
        uid: int | None = None,
    ) -> None:
        place = {"folder": str(folder or Path.cwd()), "uid": uid}
        super().__init__("client_main.py", [json.dumps(settings), json.dumps(place)], wrapper)
        assert self.hear() == "ready"

    def ask(
        self, verb: str, numbers: Sequence[int], *, seconds: float = 20, seed: int = 0
    ) -> Answer:
        """Do one thing and wait for the answer."""
        self.start(verb, numbers, seconds=seconds, seed=seed)
        return self.answer()

    def start(
        self, verb: str, numbers: Sequence[int], *, seconds: float = 20, seed: int = 0
    ) -> None:
        """Begin; `answer` follows."""
        self.tell({"verb": verb, "numbers": list(numbers), "seconds": seconds, "seed": seed})

    def answer(self) -> Answer:
        return Answer(**json.loads(self.hear()))


class Nursery(_Script):
    """Breeds processes that write to a directory, chunk after chunk, until they are killed."""

    def __init__(self) -> None:
        super().__init__("nursery_main.py", [], [])
        self.pid = 0
        self.acknowledged: list[int] = []
        """By the present process, as far as heard."""

    def __exit__(self, *exception: object) -> None:
        if self.pid:
            self.kill()
        super().__exit__(*exception)

    def breed(self, settings: Mapping[str, Any], first: int) -> None:
        """Start a process that writes chunk `first` and the following."""
        self.tell({"settings": dict(settings), "first": first})
        self.pid = int(self.hear())
        self.acknowledged = []

    def hear_first(self) -> None:
        """Wait until something is acknowledged."""
        self.acknowledged.append(int(self.hear()))

    def kill(self) -> list[int]:
        """End the process at once; return every number that it acknowledged."""
        os.kill(self.pid, signal.SIGKILL)
        while (line := self.hear()) != "dead":
            self.acknowledged.append(int(line))
        self.pid = 0
        return self.acknowledged

    def stop(self) -> None:
        """Halt all its threads, and wait until they are."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(self._is_stopped, f"the halt of process {self.pid}")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all(" T " in _stat(task) for task in tasks)


def _stat(task: Path) -> str:
    """A thread's state and what follows; its name may hold anything."""
    return " " + (task / "stat").read_text().rpartition(")")[2].strip()
