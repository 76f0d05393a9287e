from __future__ import annotations

from kvstrata.telemetry.event_consumer import BlockAddress, EventConsumer, NumberedBatch
from kvstrata.telemetry.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    encode_batch,
)


def stored(*hashes: bytes, medium: str = "CPU", group: int = 0) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=(),
        block_size=16,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )


def removed(*hashes: bytes, medium: str = "CPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def a_batch(number: int, *events: KVEvent, life: int = 0) -> NumberedBatch:
    return NumberedBatch(number, encode_batch(KVEventBatch(life + number, events)))


def an_address(block_hash: bytes, medium: str = "CPU", group: int = 0) -> BlockAddress:
    return BlockAddress(medium, None, group, block_hash)


def is_exact(consumer: EventConsumer) -> bool:
    return consumer.is_exact


class Publisher:
    """The batches that a replay can still give."""

    def __init__(self, *batches: NumberedBatch) -> None:
        self.batches = list(batches)
        self.asked: list[int] = []
        self.answers = True

    def replay(self, number: int) -> list[NumberedBatch] | None:
        self.asked.append(number)
        return [b for b in self.batches if b.number >= number] if self.answers else None


STREAM = [a_batch(i, stored(b"%d" % i)) for i in range(6)]


def test_references_are_counted_by_place_and_group() -> None:
    consumer = EventConsumer()
    consumer.receive(a_batch(0, stored(b"a", b"b"), stored(b"a"), stored(b"a", group=1)))
    consumer.receive(a_batch(1, stored(b"a", medium="STORAGE"), removed(b"a", b"b")))

    assert consumer.index == {
        an_address(b"a"): 1,
        an_address(b"a", group=1): 1,
        an_address(b"a", "STORAGE"): 1,
    }
    assert is_exact(consumer)


def test_unknown_removals_are_ignored_and_counted() -> None:
    consumer = EventConsumer()
    consumer.receive(a_batch(0, removed(b"a"), stored(b"a")))

    assert consumer.index == {an_address(b"a"): 1}
    assert consumer.num_unknown_removals == 1


def test_nothing_is_exact_before_the_first_batch() -> None:
    publisher = Publisher()
    consumer = EventConsumer(publisher.replay)
    assert not is_exact(consumer)
    publisher.answers = False
    consumer.catch_up()
    assert not is_exact(consumer)
    publisher.answers = True
    consumer.catch_up()
    assert is_exact(consumer)


def test_who_joins_late_reads_the_replay() -> None:
    publisher = Publisher(*STREAM[:4])
    consumer = EventConsumer(publisher.replay)
    consumer.receive(STREAM[3])

    assert is_exact(consumer)
    assert len(consumer.index) == 4


def test_a_gap_is_filled_by_the_replay_and_nothing_is_counted_twice() -> None:
    publisher = Publisher(*STREAM)
    consumer = EventConsumer(publisher.replay)
    for batch in (STREAM[0], STREAM[2], *STREAM[3:]):
        consumer.receive(batch)

    assert is_exact(consumer)
    assert set(consumer.index.values()) == {1}
    assert len(consumer.index) == 6
    assert publisher.asked == [0]


def test_a_gap_that_the_replay_lost_is_never_exact_again_by_itself() -> None:
    publisher = Publisher(*STREAM[3:])
    consumer = EventConsumer(publisher.replay)
    for batch in (STREAM[0], STREAM[4], STREAM[5]):
        consumer.receive(batch)

    assert not is_exact(consumer)
    assert an_address(b"5") in consumer.index


def test_a_hole_inside_the_replay_is_a_gap() -> None:
    consumer = EventConsumer(Publisher(STREAM[0], STREAM[2], STREAM[3]).replay)
    consumer.receive(STREAM[0])
    consumer.receive(STREAM[3])

    assert not is_exact(consumer)


def test_clearing_everything_makes_it_exact_again() -> None:
    consumer = EventConsumer()
    consumer.receive(STREAM[2])
    assert not is_exact(consumer)
    consumer.receive(a_batch(3, stored(b"x"), AllBlocksCleared(), stored(b"y")))

    assert is_exact(consumer)
    assert consumer.index == {an_address(b"y"): 1}


def test_a_replay_that_holds_a_clearing_makes_it_exact_again() -> None:
    cleared = a_batch(4, AllBlocksCleared())
    consumer = EventConsumer(Publisher(STREAM[3], cleared, STREAM[5]).replay)
    consumer.receive(STREAM[0])
    consumer.receive(STREAM[5])

    assert is_exact(consumer)
    assert consumer.index == {an_address(b"5"): 1}


def test_without_an_answer_the_gap_stays() -> None:
    publisher = Publisher(*STREAM)
    publisher.answers = False
    consumer = EventConsumer(publisher.replay)
    consumer.receive(STREAM[1])
    assert not is_exact(consumer)
    publisher.answers = True
    consumer.catch_up()

    assert is_exact(consumer)
    assert len(consumer.index) == 6


def test_a_lost_last_batch_is_found_by_catching_up() -> None:
    publisher = Publisher(*STREAM[:2])
    consumer = EventConsumer(publisher.replay)
    consumer.receive(STREAM[0])
    consumer.catch_up()
    consumer.receive(STREAM[1])  # it was only late

    assert consumer.next_number == 2
    assert set(consumer.index.values()) == {1}


def test_a_publisher_started_again_begins_a_new_index() -> None:
    consumer = EventConsumer()
    for batch in STREAM[:3]:
        consumer.receive(batch)
    consumer.receive(a_batch(0, stored(b"new"), life=100))

    assert is_exact(consumer)
    assert consumer.index == {an_address(b"new"): 1}


def test_a_new_life_heard_in_the_middle_is_read_from_its_start() -> None:
    publisher = Publisher(*(a_batch(i, stored(b"new%d" % i), life=100) for i in range(2)))
    consumer = EventConsumer(publisher.replay)
    for batch in STREAM[:3]:
        consumer.receive(batch)
    consumer.receive(publisher.batches[1])

    assert is_exact(consumer)
    assert len(consumer.index) == 2


def test_a_new_life_that_has_passed_our_number_is_noticed() -> None:
    publisher = Publisher(*(a_batch(i, stored(b"new%d" % i), life=100) for i in range(5)))
    consumer = EventConsumer(publisher.replay)
    for batch in STREAM[:3]:
        consumer.receive(batch)
    consumer.receive(publisher.batches[4])

    assert is_exact(consumer)
    assert an_address(b"0") not in consumer.index
    assert len(consumer.index) == 5


def test_a_lost_connection_is_doubted_until_the_replay_shows_our_last_batch() -> None:
    publisher = Publisher(*STREAM[:3])
    consumer = EventConsumer(publisher.replay)
    consumer.receive(STREAM[0])
    consumer.suspect()
    consumer.receive(STREAM[1])
    assert not is_exact(consumer)
    consumer.catch_up()

    assert is_exact(consumer)
    assert consumer.next_number == 3


def test_a_batch_that_cannot_be_read_makes_it_inexact() -> None:
    consumer = EventConsumer()
    consumer.receive(STREAM[0])
    consumer.receive(NumberedBatch(1, b"\xc1"))
    consumer.receive(STREAM[2])

    assert not is_exact(consumer)


def test_a_replay_of_another_stream_is_not_trusted() -> None:
    other = [a_batch(i, life=100) for i in range(4)]
    consumer = EventConsumer(Publisher(*other).replay)
    consumer.receive(STREAM[0])
    consumer.receive(STREAM[2])

    assert not is_exact(consumer)
