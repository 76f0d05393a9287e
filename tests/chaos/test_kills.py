from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.testing.chunks import a_label, empty, filled, within
from kvstrata.testing.servers import wait_until
from kvstrata.tiers.disk_budget import DiskBudget, Limits
from kvstrata.tiers.file_layout import StoreDirectory
from kvstrata.tiers.janitor import stored_files

from .clients import Nursery
from .support import a_generator, directory_store, rounds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstrata.interfaces import ChunkStore
    from kvstrata.testing.faults import Tally

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PLAIN = {"durability": "data", "min_free": "0B"}
CHUNK_BYTES = 4096 + 10_000
WRITERS_PER_PROCESS = 2


def leftovers(path: Path) -> list[Path]:
    return list(path.glob("namespaces/*/*/.*.tmp"))


def age_leftovers(path: Path) -> int:
    """Make dead writers' files look old, since young ones are spared; return how many."""
    found, long_ago = leftovers(path), time.time() - 120
    for file in found:
        with contextlib.suppress(FileNotFoundError):
            os.utime(file, (long_ago, long_ago))
    return len(found)


def num_kept(store: ChunkStore, numbers: Sequence[int], tally: Tally) -> int:
    buffers = [empty(a_label(number)) for number in numbers]
    outcome = store.read(buffers, within(60))
    tally.verify(buffers, outcome)
    return len(outcome.done)


def test_what_was_acknowledged_before_a_kill_is_there_afterwards(
    tmp_path: Path, tally: Tally
) -> None:
    rng, path = a_generator("kills"), tmp_path / "store"
    num_leftovers, everything = 0, list[int]()
    with Nursery() as nursery:
        for number in range(rounds(short=12, full=220)):
            nursery.breed(PLAIN | {"path": str(path)}, 100_000 * number)
            nursery.hear_first()
            time.sleep(rng.expovariate(1 / 0.03))
            acknowledged = nursery.kill()
            tally.inject("writer killed")
            num_leftovers += age_leftovers(path)
            store = directory_store(path)
            num_lost = len(acknowledged) - num_kept(store, acknowledged, tally)
            tally.count_durable(len(acknowledged), num_lost=num_lost)
            wait_until(lambda: not leftovers(path), "the janitor")
            check_count(path)
            store.close()
            everything += acknowledged
    store = directory_store(path)
    assert num_kept(store, everything, tally) == len(everything), "later kills harm nothing"
    store.close()
    assert num_leftovers > 0, "some were killed in the middle of a write"
    tally.check()


def check_count(path: Path) -> None:
    """The count of bytes becomes right again, whatever the dead had reserved."""
    directory, budget = StoreDirectory(path), DiskBudget(path / "usage", Limits())
    used = sum(file.size for file in stored_files(directory))
    wait_until(lambda: budget.usage().used_bytes == used, "the right count")
    budget.close()


def test_a_process_that_goes_on_clears_up_after_those_that_die(
    tmp_path: Path, tally: Tally
) -> None:
    """The elected janitor lives on while others come and are killed, near the quota."""
    rng, path = a_generator("survivor"), tmp_path / "store"
    settings = PLAIN | {"path": str(path), "quota": f"{40 * CHUNK_BYTES}B"}
    survivor = directory_store(path, quota_bytes=40 * CHUNK_BYTES)
    num_leftovers = 0
    with Nursery() as nursery:
        for number in range(rounds(short=6, full=40)):
            nursery.breed(settings, 100_000 * number)
            nursery.hear_first()
            time.sleep(rng.expovariate(1 / 0.05))
            nursery.kill()
            tally.inject("writer killed")
            num_leftovers += age_leftovers(path)
    wait_until_tidy(survivor, path)
    survivor.close()
    assert num_leftovers > 0, "some were killed in the middle of a write"


def wait_until_tidy(store: ChunkStore, path: Path) -> None:
    """Go on with writing, so that the janitor has something to do."""
    end, number = within(10), 10**9
    while leftovers(path) and time.monotonic() < end:
        store.write([filled(a_label(number))], within(10))
        number += 1
        time.sleep(0.01)
    assert not leftovers(path), "dead writers' files stay for as long as the janitor lives"


@pytest.mark.parametrize("killed_share", [0.0, 0.1])
def test_the_quota_is_exceeded_by_no_more_than_a_chunk_per_writer(
    tmp_path: Path, tally: Tally, killed_share: float
) -> None:
    """Several processes are halted at random moments, so that all files can be counted at once.

    A killed writer counts for a second: its file stays until the janitor has looked.
    """
    rng, path = a_generator("quota"), tmp_path / "store"
    quota_bytes = 60 * CHUNK_BYTES
    settings = PLAIN | {"path": str(path), "quota": f"{quota_bytes}B", "durability": "none"}
    directory_store(path).close()
    with Nursery() as first, Nursery() as second, Nursery() as third:
        writers = [first, second, third]
        for number, writer in enumerate(writers):
            writer.breed(settings, 10**7 * number)
        deaths: list[float] = []
        for number in range(rounds(short=25, full=350)):
            time.sleep(rng.expovariate(1 / 0.01))
            num_dead = sum(time.monotonic() - death < 1 for death in deaths)
            excess = halted_size(path, writers) - quota_bytes
            num_writers = WRITERS_PER_PROCESS * (len(writers) + num_dead)
            tally.weigh(excess / CHUNK_BYTES / num_writers)
            if rng.random() < killed_share:
                replace_one(rng.choice(writers), settings, 10**8 + 10**6 * number)
                deaths.append(time.monotonic())
                tally.inject("writer killed")
    tally.check()


def halted_size(path: Path, writers: Sequence[Nursery]) -> int:
    """Bytes in all files, while nobody writes."""
    for writer in writers:
        writer.stop()
    used = sum(file.size for file in stored_files(StoreDirectory(path)))
    for writer in writers:
        writer.resume()
    return used


def replace_one(writer: Nursery, settings: dict[str, str], first: int) -> None:
    writer.kill()
    writer.breed(settings, first)
