"""Eviction policies: the contract, models to compare with, and what sets each apart."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.config.schema import EvictionName
from kvstrata.errors import ConfigError
from kvstrata.policies.arc import ArcPolicy
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.queues import ASKS_PER_POP
from kvstrata.policies.registry import POLICIES, make_policy
from kvstrata.policies.s3_fifo import S3FifoPolicy
from kvstrata.testing.policy_contract import (
    CAPACITY_BYTES,
    KIB,
    MIB,
    PolicyContract,
    any_may_leave,
    drain,
    keys_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import EvictionPolicy

NAMES = sorted(POLICIES)


class TestLruPolicy(PolicyContract):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return LruPolicy(CAPACITY_BYTES)


class TestS3FifoPolicy(PolicyContract):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return S3FifoPolicy(CAPACITY_BYTES)


class TestArcPolicy(PolicyContract):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return ArcPolicy(CAPACITY_BYTES)


# --- registry ------------------------------------------------------------------------------


def test_every_configured_name_has_a_policy() -> None:
    assert set(POLICIES) == set(get_args(EvictionName))
    assert all(make_policy(name, MIB).evict(any_may_leave) is None for name in POLICIES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy is called 'fifo'; accepted: .*lru.*arc"):
        make_policy(cast("EvictionName", "fifo"), MIB)


# --- against a plain set -------------------------------------------------------------------

small_keys = st.lists(st.integers(0, 30), max_size=6).map(lambda numbers: keys_of(*numbers))
key_sets = st.frozensets(st.integers(0, 30)).map(lambda numbers: frozenset(keys_of(*numbers)))


class PolicyMachine(RuleBasedStateMachine):
    """A policy next to the set of what it should follow, with few keys so that they return."""

    @initialize(name=st.sampled_from(NAMES), capacity=st.integers(1, 40))
    def start(self, name: EvictionName, capacity: int) -> None:
        self.policy: Any = make_policy(name, capacity)
        self.capacity = capacity
        self.followed: set[ChunkKey] = set()

    @rule(keys=small_keys)
    def insert(self, keys: Sequence[ChunkKey]) -> None:
        self.policy.insert(keys, [1 + key[31] % 5 for key in keys])
        self.followed.update(keys)

    @rule(keys=small_keys)
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self.policy.touch(keys)

    @rule(keys=small_keys)
    def remove(self, keys: Sequence[ChunkKey]) -> None:
        self.policy.remove(keys)
        self.followed.difference_update(keys)

    @rule(leased=key_sets, times=st.integers(1, 5))
    def evict(self, leased: frozenset[ChunkKey], times: int) -> None:
        for _ in range(times):
            victim = self.policy.evict(lambda key: key not in leased)
            assert (victim is None) == (self.followed <= leased)
            if victim is not None:
                assert victim not in leased
                self.followed.remove(victim)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.policy) == len(self.followed)

    @invariant()
    def ghosts_are_bounded(self) -> None:
        assert 0 <= getattr(self.policy, "ghost_bytes", 0) <= self.capacity

    @invariant()
    def target_is_within_the_capacity(self) -> None:
        assert 0 <= getattr(self.policy, "target_bytes", 0) <= self.capacity

    def teardown(self) -> None:
        assert sorted(drain(self.policy)) == sorted(self.followed)


TestPolicyMachine = PolicyMachine.TestCase

# --- least recently used -------------------------------------------------------------------

lru_steps = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "remove"]), small_keys)
    | st.tuples(st.just("evict"), key_sets)
)


@given(lru_steps)
def test_lru_has_the_order_of_an_ordered_dict(
    steps: list[tuple[str, Sequence[ChunkKey] | frozenset[ChunkKey]]],
) -> None:
    policy = LruPolicy(MIB)
    model: OrderedDict[ChunkKey, None] = OrderedDict()
    for step, keys in steps:
        if isinstance(keys, frozenset):
            expected = next((key for key in model if key not in keys), None)
            assert policy.evict(lambda key, leased=keys: key not in leased) == expected  # type: ignore[misc]
            if expected is not None:
                del model[expected]
            continue
        apply_to_policy(policy, step, keys)
        apply_to_model(model, step, keys)
    assert drain(policy) == list(model)


def apply_to_policy(policy: LruPolicy, step: str, keys: Sequence[ChunkKey]) -> None:
    if step == "insert":
        policy.insert(keys, [KIB] * len(keys))
    elif step == "touch":
        policy.touch(keys)
    else:
        policy.remove(keys)


def apply_to_model(model: OrderedDict[ChunkKey, None], step: str, keys: Sequence[ChunkKey]) -> None:
    for key in reversed(keys):
        is_known = key in model
        if step == "remove":
            model.pop(key, None)
        elif step == "insert" or is_known:
            model[key] = None
            model.move_to_end(key)


# --- leased chunks -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_long_row_of_leased_chunks_is_not_asked_about_each_time(name: EvictionName) -> None:
    leased, free = keys_of(*range(10_000)), keys_of(*range(10_000, 10_500))
    policy = make_policy(name, 10_500 * KIB)
    policy.insert(leased, [KIB] * len(leased))
    policy.insert(free, [KIB] * len(free))
    held, num_asked = frozenset(leased), 0

    def may_leave(key: ChunkKey) -> bool:
        nonlocal num_asked
        num_asked += 1
        return key not in held

    for _ in free:
        assert policy.evict(may_leave) is not None

    assert num_asked <= len(leased) + len(free) * (ASKS_PER_POP + 1)


@pytest.mark.parametrize("name", NAMES)
def test_leases_that_end_in_a_long_row_are_noticed_soon(name: EvictionName) -> None:
    num_leased = 100 * ASKS_PER_POP
    leased, free = keys_of(*range(num_leased)), keys_of(*range(num_leased, num_leased + 300))
    policy = make_policy(name, 2 * num_leased * KIB)
    policy.insert(leased, [KIB] * num_leased)
    policy.insert(free, [KIB] * len(free))
    held = frozenset(leased)
    policy.evict(lambda key: key not in held)

    victims = [policy.evict(any_may_leave) for _ in range(200)]

    num_late = next(n for n, victim in enumerate(victims) if victim in held)
    assert num_late <= num_leased // ASKS_PER_POP
    assert victims[num_late:] == leased[::-1][: len(victims) - num_late]


# --- S3-FIFO -------------------------------------------------------------------------------


def fill(
    policy: EvictionPolicy, present: set[ChunkKey], keys: Sequence[ChunkKey], size: int
) -> None:
    """Insert one by one, as a tier of 100 chunks of this size would."""
    for key in keys:
        policy.insert([key], [size])
        present.add(key)
        while len(present) > 100:
            victim = policy.evict(any_may_leave)
            assert victim is not None
            present.remove(victim)


def test_s3_fifo_keeps_a_hot_set_through_a_scan() -> None:
    hot, scan = keys_of(*range(50)), keys_of(*range(1000, 3000))
    survivors = {}
    for name, policy in (("lru", LruPolicy(0)), ("s3fifo", S3FifoPolicy(100 * MIB))):
        present: set[ChunkKey] = set()
        fill(policy, present, hot, MIB)
        policy.touch(hot)
        fill(policy, present, scan, MIB)
        survivors[name] = len(present.intersection(hot))

    assert survivors == {"lru": 0, "s3fifo": 50}


def test_s3_fifo_takes_back_what_left_too_early() -> None:
    policy = S3FifoPolicy(100 * MIB)
    present: set[ChunkKey] = set()
    early = keys_of(1)
    fill(policy, present, [*early, *keys_of(*range(100, 200))], MIB)
    assert early[0] not in present
    assert policy.ghost_bytes == MIB

    fill(policy, present, early, MIB)
    assert policy.ghost_bytes == MIB
    fill(policy, present, keys_of(*range(1000, 1300)), MIB)

    assert early[0] in present


@pytest.mark.parametrize(("size", "leaves"), [(64 * KIB, False), (60 * MIB, True)])
def test_s3_fifo_measures_its_small_queue_in_bytes(size: int, *, leaves: bool) -> None:
    policy = S3FifoPolicy(100 * MIB)
    used, new = keys_of(*range(91)), keys_of(100)
    policy.insert(used, [MIB] * 91)
    policy.touch(used)
    assert policy.evict(any_may_leave) == used[-1]

    policy.insert(new, [size])

    assert (policy.evict(any_may_leave) == new[0]) == leaves


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_ghosts_are_bounded_by_bytes(name: EvictionName) -> None:
    policy: Any = make_policy(name, 100 * MIB)
    sizes = [64 * KIB, 60 * MIB, MIB]
    most = 0
    for number in range(5000):
        policy.insert(keys_of(number), [sizes[number % 3]])
        policy.evict(any_may_leave)
        most = max(most, policy.ghost_bytes)

    assert 60 * MIB < most <= 100 * MIB


# --- ARC -----------------------------------------------------------------------------------


def test_arc_gives_room_to_recency_when_recent_chunks_return() -> None:
    policy = ArcPolicy(100 * MIB)
    present: set[ChunkKey] = set()
    hot, recent = keys_of(*range(60)), keys_of(*range(100, 150))
    fill(policy, present, hot, MIB)
    policy.touch(hot)
    fill(policy, present, recent, MIB)
    assert policy.target_bytes == 0

    fill(policy, present, recent[:10], MIB)

    assert policy.target_bytes >= 10 * MIB


def test_arc_gives_room_back_when_frequent_chunks_return() -> None:
    policy = ArcPolicy(100 * MIB)
    present: set[ChunkKey] = set()
    hot, recent = keys_of(*range(60)), keys_of(*range(100, 150))
    fill(policy, present, hot, MIB)
    policy.touch(hot)
    for _ in range(3):
        fill(policy, present, recent, MIB)
    target = policy.target_bytes
    lost = [key for key in hot if key not in present]
    assert lost

    fill(policy, present, lost, MIB)

    assert policy.target_bytes < target


def test_arc_keeps_a_hot_set_through_a_scan() -> None:
    policy = ArcPolicy(100 * MIB)
    present: set[ChunkKey] = set()
    hot = keys_of(*range(50))
    fill(policy, present, hot, MIB)
    policy.touch(hot)
    fill(policy, present, keys_of(*range(1000, 3000)), MIB)

    assert present.issuperset(hot)


def test_arc_moves_its_target_by_bytes() -> None:
    policy = ArcPolicy(100 * MIB)
    keys = keys_of(1, 2)
    policy.insert(keys, [2 * MIB, 30 * MIB])
    assert drain(policy) == keys[::-1]

    policy.insert(keys[1:], [30 * MIB])
    assert policy.target_bytes == 30 * MIB
    policy.insert(keys[:1], [2 * MIB])
    assert policy.target_bytes == 32 * MIB
