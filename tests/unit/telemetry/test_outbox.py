from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.telemetry.kv_events import AllBlocksCleared, KVEventBatch
from kvstrata.telemetry.outbox import Outbox

EVENT = AllBlocksCleared()


def an_outbox(max_batches: int) -> Outbox:
    return Outbox(max_batches, data_parallel_rank=2, clock=lambda: 5.0)


def test_batches_come_out_in_order_with_numbers_from_zero() -> None:
    outbox = an_outbox(3)
    outbox.put([EVENT])
    outbox.put([EVENT, EVENT])

    assert outbox.take() == (0, KVEventBatch(5.0, (EVENT,), 2))
    assert outbox.take() == (1, KVEventBatch(5.0, (EVENT, EVENT), 2))
    assert outbox.take() is None


def test_a_dropped_batch_leaves_a_gap_even_if_nothing_follows() -> None:
    outbox = an_outbox(1)
    outbox.put([EVENT])
    outbox.put([EVENT])

    assert outbox.num_dropped == 1
    taken = [outbox.take(), outbox.take(), outbox.take()]
    assert taken == [(0, KVEventBatch(5.0, (EVENT,), 2)), (2, KVEventBatch(5.0, (), 2)), None]


@given(
    max_batches=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["put", "put", "take"]), max_size=30),
)
def test_every_drop_is_a_missing_number(max_batches: int, steps: list[str]) -> None:
    outbox, numbers, num_put = an_outbox(max_batches), [-1], 0
    for step in [*steps, *["take"] * 40]:
        if step == "put":
            outbox.put([EVENT])
            num_put += 1
        elif (outgoing := outbox.take()) is not None:
            numbers.append(outgoing.number)
            num_put -= bool(outgoing.batch.events)

    assert num_put == outbox.num_dropped
    gaps = [after - before - 1 for before, after in pairwise(numbers)]
    assert sum(gaps) >= outbox.num_dropped
    assert min(gaps, default=0) >= 0
