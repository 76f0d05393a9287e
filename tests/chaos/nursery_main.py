"""Forks a writer for each line of its input, prints its process number, and when it is dead.

A writer prints the number of each chunk that was acknowledged; it ends only by being killed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.config.units import ByteSize, Duration
from kvstrata.core.chunk_label import Rank
from kvstrata.testing.chunks import a_label, a_namespace, filled, within
from kvstrata.tiers.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_THREADS = 2


def flood(settings: dict[str, Any], first: int) -> None:
    """Write chunks until killed."""
    config = msgspec.convert(settings, FilesystemTierConfig, dec_hook=quantity)
    store = FilesystemStore(config, a_namespace(), Rank())
    numbers = itertools.count(first)
    threads = [threading.Thread(target=write, args=(store, numbers)) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def quantity(kind: type, text: object) -> ByteSize | Duration:
    return ByteSize.parse(text) if kind is ByteSize else Duration.parse(text)


def write(store: FilesystemStore, numbers: Iterator[int]) -> None:
    for number in numbers:
        buffer = filled(a_label(number))
        if store.write([buffer], within(10)).done:
            say(number)


def say(what: object) -> None:
    os.write(1, f"{what}\n".encode())


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            say(os.getpid())
            flood(order["settings"], order["first"])
            os._exit(1)
        os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main()
