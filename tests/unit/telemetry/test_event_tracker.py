from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.config.parsing import parse_config
from kvstrata.core.chunk_grid import ChunkGrid
from kvstrata.core.hashing import PrefixHasher
from kvstrata.core.ids import GroupId
from kvstrata.core.layout import KVGroup, KVLayer, Sharding
from kvstrata.telemetry.event_tracker import (
    EventsTracker,
    NullTracker,
    OffloadingEventsTracker,
    TrackerLimits,
    make_tracker,
)
from kvstrata.telemetry.kv_events import BlockRemoved, BlockStored, as_low_64_bits
from kvstrata.testing.builders import (
    a_geometry,
    a_layout,
    full_group,
    recurrent_group,
    window_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import BlockHash, ChunkKey

FULL, WINDOW, STATE = GroupId(0), GroupId(1), GroupId(2)
GEOMETRY = a_geometry(
    a_layout(full_group(), window_group(40), recurrent_group(64), hash_block=16), 32, 16, 64
)
TOKENS = [1000 + i for i in range(128)]


class ARequest:
    """A request whose chunks can be described and named."""

    def __init__(self, tokens: Sequence[int] = TOKENS, lora: str | None = None) -> None:
        hasher = PrefixHasher(GEOMETRY.layout.hash_block_tokens)
        hasher.extend(tokens)
        self.tokens, self.lora = tokens, lora
        self.hashes: Sequence[BlockHash] = hasher.hashes
        self.grid = ChunkGrid(GEOMETRY, hasher.hashes)

    def describe(self, tracker: EventsTracker, group: GroupId, index: int) -> ChunkKey:
        tracker.describe(self.grid, group, index, tokens=self.tokens, lora=self.lora)
        return self.grid.key(group, index)


def test_a_stored_chunk_says_everything_about_itself() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest(lora="sql")
    tracker.stored(request.describe(tracker, FULL, 1), "host")

    assert tracker.take_events() == [
        BlockStored(
            block_hashes=tuple(request.hashes[2:4]),
            parent_block_hash=request.hashes[1],
            token_ids=tuple(TOKENS[32:64]),
            block_size=16,
            lora_id=None,
            medium="CPU",
            lora_name="sql",
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            locality="LOCAL",
            ownership="host",
        )
    ]
    assert tracker.take_events() == []


def test_the_first_chunk_has_no_parent_and_a_window_chunk_has_its_window() -> None:
    tracker = OffloadingEventsTracker()
    tracker.stored(ARequest().describe(tracker, WINDOW, 0), "host")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 40)


def test_a_state_announces_only_the_length_it_stands_for() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    tracker.stored(request.describe(tracker, STATE, 1), "host")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.block_hashes == (request.hashes[7],)
    assert event.parent_block_hash == request.hashes[6]
    assert event.token_ids == tuple(TOKENS[112:128])
    assert event.kv_cache_spec_kind == "mamba"


def test_latent_attention_has_a_kind_of_its_own() -> None:
    latent = KVGroup(
        kind=full_group().kind,
        block_tokens=16,
        layers=(KVLayer("mla", 64),),
        sharding=Sharding.REPLICATED,
    )
    geometry = a_geometry(a_layout(latent), 16)
    hasher = PrefixHasher(16)
    hasher.extend(TOKENS)
    grid, tracker = ChunkGrid(geometry, hasher.hashes), OffloadingEventsTracker()
    tracker.describe(grid, FULL, 0, tokens=TOKENS, lora=None)
    tracker.stored(grid.key(FULL, 0), "host")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.kv_cache_spec_kind == "mla_attention"


def test_every_tier_is_announced_and_taken_back_by_itself() -> None:
    tracker, request = OffloadingEventsTracker({"bucket": "REMOTE"}), ARequest()
    key = request.describe(tracker, FULL, 0)
    tracker.stored(key, "host")
    tracker.stored(key, "bucket")
    stored = tracker.take_events()
    tracker.removed(key, "host")
    (removed,) = tracker.take_events()

    places = [(e.medium, e.locality, e.ownership) for e in stored if isinstance(e, BlockStored)]
    assert places == [("CPU", "LOCAL", "host"), ("STORAGE", "REMOTE", "bucket")]
    assert removed == BlockRemoved(
        block_hashes=tuple(request.hashes[:2]),
        medium="CPU",
        group_idx=0,
        locality="LOCAL",
        ownership="host",
    )
    assert tracker.residencies("bucket") == {key}


def test_told_twice_is_announced_once() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    key = request.describe(tracker, FULL, 0)
    for _ in range(2):
        request.describe(tracker, FULL, 0)
        tracker.stored(key, "host")
    assert len(tracker.take_events()) == 1
    tracker.stored(key, "host")
    assert tracker.take_events() == []
    for _ in range(2):
        tracker.removed(key, "host")
    assert len(tracker.take_events()) == 1
    tracker.check_invariants()


def test_unknown_removals_and_short_visits_make_no_events() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    key = request.describe(tracker, FULL, 0)
    tracker.removed(key, "disk")
    tracker.stored(key, "host")
    tracker.removed(key, "host")

    assert tracker.take_events() == []
    tracker.check_invariants()


def test_a_chunk_that_left_and_came_back_is_still_announced_once() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    key = request.describe(tracker, FULL, 0)
    tracker.stored(key, "host")
    tracker.take_events()
    tracker.removed(key, "host")
    tracker.stored(key, "host")

    assert tracker.take_events() == []


def test_chunks_that_share_hashes_announce_them_once_each_and_removals_come_first() -> None:
    one, other = ARequest(), ARequest([*TOKENS[:16], *range(112)])
    tracker = OffloadingEventsTracker()
    first, second = one.describe(tracker, FULL, 0), other.describe(tracker, FULL, 0)
    tracker.stored(first, "host")
    tracker.take_events()
    tracker.stored(second, "host")
    tracker.removed(first, "host")

    removed, stored = tracker.take_events()

    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert removed.block_hashes[0] == stored.block_hashes[0] == one.hashes[0]
    assert removed.block_hashes[1] != stored.block_hashes[1]


def test_a_chunk_described_late_is_announced_then() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    tracker.stored(request.grid.key(FULL, 0), "disk")
    assert tracker.take_events() == []
    request.describe(tracker, FULL, 0)

    assert len(tracker.take_events()) == 1
    tracker.check_invariants()


def test_the_description_outlives_the_last_residency_until_it_is_forgotten() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    key = request.describe(tracker, FULL, 0)
    tracker.stored(key, "host")
    tracker.stored(key, "disk")
    tracker.take_events()
    for tier in ("host", "disk"):
        tracker.removed(key, tier)
        assert len(tracker.take_events()) == 1
    tracker.stored(key, "host")  # it was on its way back
    assert len(tracker.take_events()) == 1
    tracker.removed(key, "host")
    tracker.take_events()
    tracker.forget([key])
    tracker.stored(key, "host")

    assert tracker.take_events() == []
    tracker.check_invariants()


def test_forget_drops_only_what_rests_nowhere() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    kept, dropped = request.describe(tracker, FULL, 0), request.describe(tracker, FULL, 1)
    tracker.stored(kept, "host")
    tracker.forget([kept, dropped, request.grid.key(STATE, 0)])
    tracker.stored(dropped, "host")

    assert len(tracker.take_events()) == 1
    tracker.check_invariants()


def test_clear_takes_back_one_tier_or_all() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    keys = [request.describe(tracker, FULL, i) for i in range(3)]
    for key in keys:
        tracker.stored(key, "host")
        tracker.stored(key, "disk")
    tracker.take_events()

    tracker.clear("disk")
    assert [type(event) for event in tracker.take_events()] == [BlockRemoved] * 3
    assert tracker.residencies("host") == set(keys)
    tracker.clear()
    assert [type(event) for event in tracker.take_events()] == [BlockRemoved] * 3
    assert not tracker.residencies("host")
    tracker.clear("nowhere")
    tracker.check_invariants()


def test_everything_can_be_announced_again() -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()
    kept, gone = request.describe(tracker, FULL, 0), request.describe(tracker, FULL, 1)
    tracker.stored(kept, "host")
    tracker.stored(gone, "host")
    tracker.take_events()
    tracker.removed(gone, "host")
    tracker.announce_again()

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.block_hashes == tuple(request.hashes[:2])
    tracker.check_invariants()


def test_more_than_the_limits_is_left_out_and_counted() -> None:
    tracker = OffloadingEventsTracker(limits=TrackerLimits(max_residencies=1, max_waiting=1))
    request = ARequest()
    oldest, newest = request.describe(tracker, FULL, 0), request.describe(tracker, FULL, 1)
    tracker.stored(newest, "host")
    tracker.stored(oldest, "host")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.block_hashes == tuple(request.hashes[2:4])
    assert tracker.num_refused == 1
    tracker.removed(oldest, "host")
    assert tracker.take_events() == []
    tracker.check_invariants()


def test_hashes_can_be_numbers() -> None:
    tracker, request = OffloadingEventsTracker(external_hash=as_low_64_bits), ARequest()
    tracker.stored(request.describe(tracker, FULL, 1), "host")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert event.block_hashes == tuple(map(as_low_64_bits, request.hashes[2:4]))
    assert event.parent_block_hash == as_low_64_bits(request.hashes[1])


@pytest.mark.parametrize("tokens", [TOKENS[:63], [*TOKENS[:63], -1], [*TOKENS[:63], 2**32]])
def test_tokens_that_are_not_there_or_not_tokens_are_refused(tokens: list[int]) -> None:
    tracker, request = OffloadingEventsTracker(), ARequest()

    with pytest.raises(ValueError, match="token"):
        tracker.describe(request.grid, FULL, 1, tokens=tokens, lora=None)
    tracker.check_invariants()


def test_the_null_tracker_knows_nothing() -> None:
    tracker: EventsTracker = NullTracker()
    key = ARequest().describe(tracker, FULL, 0)
    tracker.stored(key, "host")
    tracker.removed(key, "host")
    tracker.forget([key])
    tracker.clear()
    tracker.announce_again()
    tracker.check_invariants()

    assert tracker.take_events() == []
    assert tracker.residencies("host") == frozenset()


def test_the_configuration_chooses_the_tracker() -> None:
    assert isinstance(make_tracker(parse_config({})), NullTracker)
    tiers = [{"kind": "valkey", "url": "valkey://cache:6379/0", "name": "cache"}]
    tracker = make_tracker(parse_config({"events": {"self_describing": True}, "tiers": tiers}))
    tracker.stored(ARequest().describe(tracker, FULL, 0), "cache")

    (event,) = tracker.take_events()

    assert isinstance(event, BlockStored)
    assert (event.locality, event.ownership) == ("REMOTE", "cache")
