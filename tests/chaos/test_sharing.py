from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.testing.servers import HOST

from .clients import Nursery, StoreClient
from .network import REDIS_PORT, S3_PORT, SERVER_ADDRESS, distant_redis, distant_s3, laid_cable
from .support import BUCKET, a_generator, rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstrata.testing.faults import Tally

    from .network import Cable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

Settings = dict[str, Any]


def valkey_settings(host: str, port: int) -> Settings:
    return {"kind": "valkey", "url": f"valkey://{host}:{port}"}


def s3_settings(host: str, port: int) -> Settings:
    place = {"url": f"s3://{BUCKET}/shared", "endpoint": f"http://{host}:{port}"}
    return {"kind": "object_store", "region": "us-east-1", **place}


@pytest.fixture(params=["directory", "redis", "s3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[StoreClient]]:
    """Two processes on one machine."""
    settings = {"kind": "filesystem", "path": str(tmp_path / "store"), "min_free": "0B"}
    if request.param == "redis":
        settings = valkey_settings(HOST, request.getfixturevalue("redis").port)
    elif request.param == "s3":
        settings = s3_settings(HOST, request.getfixturevalue("s3").port)
    with StoreClient(settings) as one, StoreClient(settings) as other:
        yield [one, other]


@pytest.fixture
def cable() -> Iterator[Cable]:
    with laid_cable() as cable:
        yield cable


@pytest.fixture(params=["redis", "s3"])
def distant(
    request: pytest.FixtureRequest, cable: Cable, tmp_path: Path
) -> Iterator[list[StoreClient]]:
    """Two processes in two network namespaces; the server is in the first one's."""
    if request.param == "redis":
        settings, serving = valkey_settings(SERVER_ADDRESS, REDIS_PORT), distant_redis
    else:
        settings, serving = s3_settings(SERVER_ADDRESS, S3_PORT), distant_s3
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(cable, tmp_path))
        wrappers = (cable.at_server(), cable.at_client())
        yield [stack.enter_context(StoreClient(settings, wrapper=w)) for w in wrappers]


def check_each_reads_what_the_other_wrote(pair: Sequence[StoreClient], tally: Tally) -> None:
    for first, (writer, reader) in ((0, pair), (100, pair[::-1])):
        numbers = list(range(first, first + 30))
        assert writer.ask("write", numbers).done == numbers
        assert reader.ask("find", numbers).done == numbers
        answer = reader.ask("read", numbers)
        assert answer.done == numbers
        tally.count_verified(len(answer.done), num_wrong=answer.num_wrong)
        assert reader.ask("remove", numbers[:5]).done == numbers[:5]
        assert writer.ask("read", numbers).absent == numbers[:5]


def check_that_rivals_leave_one_good_chunk(pair: Sequence[StoreClient], tally: Tally) -> None:
    """Both write the same keys at once, with bytes that tell them apart, and one removes some."""
    numbers = list(range(1000, 1010))
    for _ in range(rounds(short=5, full=60)):
        for seed, client in enumerate(pair):
            client.start("write", numbers, seed=seed)
        assert [client.answer().done for client in pair] == [numbers, numbers]
        answers = [client.ask("read", numbers) for client in pair]
        assert [answer.done for answer in answers] == [numbers, numbers]
        tally.count_verified(20, num_wrong=sum(answer.num_wrong for answer in answers))
        pair[0].ask("remove", numbers)
    tally.check()


def test_each_process_reads_what_the_other_wrote(pair: list[StoreClient], tally: Tally) -> None:
    check_each_reads_what_the_other_wrote(pair, tally)
    check_that_rivals_leave_one_good_chunk(pair, tally)


def test_each_network_reads_what_the_other_wrote(distant: list[StoreClient], tally: Tally) -> None:
    check_each_reads_what_the_other_wrote(distant, tally)
    check_that_rivals_leave_one_good_chunk(distant, tally)


def test_a_pulled_cable_costs_no_more_than_the_deadline(
    distant: list[StoreClient], cable: Cable, tally: Tally
) -> None:
    rng, numbers, (near, far) = a_generator("cable"), list(range(10)), distant
    for _ in range(rounds(short=1, full=15)):
        assert near.ask("write", numbers).done == numbers
        cable.pull()
        tally.inject("network cut")
        given_s = rng.uniform(0.5, 0.9)
        answer = far.ask(rng.choice(["read", "write", "find"]), numbers, seconds=given_s)
        tally.time(answer.seconds, given_s)
        assert set(answer.failed.values()) <= {"TierTimeout", "TierUnavailable"}
        assert len(answer.failed) == len(numbers)
        cable.plug()
        answer = far.ask("read", numbers)
        assert answer.done == numbers, "back as soon as the cable is"
        tally.count_verified(len(answer.done), num_wrong=answer.num_wrong)
    tally.check()


def test_processes_that_open_a_new_directory_at_once_all_succeed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery()) for _ in range(4)]
        for number in range(rounds(short=10, full=60)):
            settings = {"path": str(tmp_path / str(number)), "min_free": "0B"}
            for index, nursery in enumerate(nurseries):
                nursery.tell({"settings": settings, "first": 1000 * index})
            for nursery in nurseries:
                nursery.pid = int(nursery.hear())
            for nursery in nurseries:
                line = nursery.hear()
                assert line != "dead", "could not open the store"
                nursery.kill()
