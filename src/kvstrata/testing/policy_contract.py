"""What every `EvictionPolicy` must do, as a suite to inherit from.

class TestMyPolicy(PolicyContract):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return MyPolicy(CAPACITY_BYTES)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvstrata.core.ids import BlockHash, GroupId, chunk_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import EvictionPolicy

KIB: Final = 1024
MIB: Final = 1024 * KIB
CAPACITY_BYTES: Final = 1024 * MIB
"""Room for everything that the suite inserts."""

_SIZES: Final = (64 * KIB, 60 * MIB, 1 * MIB, 300 * KIB)


def keys_of(*numbers: int) -> list[ChunkKey]:
    """One key for each number; equal numbers, equal keys."""
    return [chunk_key(BlockHash(number.to_bytes(32, "big")), GroupId(0)) for number in numbers]


def sizes_of(keys: Sequence[ChunkKey]) -> list[int]:
    """Sizes that differ as those of attention and recurrent chunks do; one per key, always."""
    return [_SIZES[key[31] % len(_SIZES)] for key in keys]


def any_may_leave(_: ChunkKey) -> bool:
    """No chunk is leased."""
    return True


def all_but(*leased: ChunkKey) -> Callable[[ChunkKey], bool]:
    """These chunks are leased."""
    held = frozenset(leased)
    return lambda key: key not in held


def drain(
    policy: EvictionPolicy, may_leave: Callable[[ChunkKey], bool] = any_may_leave
) -> list[ChunkKey]:
    """Everything that may leave, in the order in which it leaves."""
    return list(iter(lambda: policy.evict(may_leave), None))


class PolicyContract:
    """Inherit, and provide the fixture `policy`: empty, for `CAPACITY_BYTES`."""

    def test_an_empty_policy_has_no_victim(self, policy: EvictionPolicy) -> None:
        """Before anything came, and after all has left."""
        assert policy.evict(any_may_leave) is None
        policy.insert(keys_of(1), [MIB])
        assert policy.evict(any_may_leave) == keys_of(1)[0]
        assert policy.evict(any_may_leave) is None

    def test_every_chunk_leaves_once(self, policy: EvictionPolicy) -> None:
        """Whatever their sizes and however often they were used."""
        keys = keys_of(*range(60))
        for start in range(0, 60, 6):
            batch = keys[start : start + 6]
            policy.insert(batch, sizes_of(batch))
            policy.touch(keys[: start // 2])

        assert sorted(drain(policy)) == sorted(keys)

    def test_empty_batches_change_nothing(self, policy: EvictionPolicy) -> None:
        """A request without chunks is a request."""
        policy.insert([], [])
        policy.touch([])
        policy.remove([])
        assert policy.evict(any_may_leave) is None

    def test_every_key_needs_a_size(self, policy: EvictionPolicy) -> None:
        """Atomic: a batch that does not match is refused as a whole."""
        with pytest.raises(ValueError, match="zip"):
            policy.insert(keys_of(1, 2), [MIB])
        assert policy.evict(any_may_leave) is None

    @pytest.mark.parametrize("num_uses", range(5))
    def test_a_suffix_leaves_before_its_prefix(self, policy: EvictionPolicy, num_uses: int) -> None:
        """Inserted and used together, any number of times."""
        keys = keys_of(*range(20))
        policy.insert(keys, sizes_of(keys))
        for _ in range(num_uses):
            policy.touch(keys)

        assert drain(policy) == keys[::-1]

    @pytest.mark.parametrize("num_uses", range(1, 5))
    def test_a_suffix_that_came_later_leaves_before_its_prefix(
        self, policy: EvictionPolicy, num_uses: int
    ) -> None:
        """Turns of one conversation, then uses of all of it."""
        keys = keys_of(*range(12))
        for start in range(0, 12, 4):
            policy.touch(keys[:start])
            policy.insert(keys[start : start + 4], sizes_of(keys[start : start + 4]))
        for _ in range(num_uses):
            policy.touch(keys)

        assert drain(policy) == keys[::-1]

    def test_a_suffix_that_returns_leaves_before_its_prefix(self, policy: EvictionPolicy) -> None:
        """What a policy remembers of a suffix does not lift it above its prefix."""
        keys = keys_of(*range(4))
        policy.insert(keys, sizes_of(keys))
        lost = [policy.evict(any_may_leave), policy.evict(any_may_leave)]
        assert lost == [keys[3], keys[2]]

        policy.insert(keys, sizes_of(keys))

        assert drain(policy) == keys[::-1]

    def test_what_returns_after_a_removal_keeps_the_order(self, policy: EvictionPolicy) -> None:
        """The suffix is remembered, the prefix was removed: the prefix still outlives it."""
        keys = keys_of(1, 2)
        policy.insert(keys, sizes_of(keys))
        policy.evict(any_may_leave)
        policy.remove(keys[:1])

        policy.insert(keys, sizes_of(keys))

        assert drain(policy) == keys[::-1]

    def test_a_used_chunk_outlives_an_unused_one(self, policy: EvictionPolicy) -> None:
        """The older one was touched."""
        (old,), (new,) = keys_of(1), keys_of(2)
        policy.insert([old], [MIB])
        policy.insert([new], [MIB])
        policy.touch([old])

        assert drain(policy) == [new, old]

    def test_inserting_a_known_key_is_a_touch(self, policy: EvictionPolicy) -> None:
        """It is followed once, and outlives what was not used."""
        (old,), (new,) = keys_of(1), keys_of(2)
        policy.insert([old], [MIB])
        policy.insert([new], [MIB])
        policy.insert([old], [MIB])

        assert drain(policy) == [new, old]

    def test_touching_an_unknown_key_is_ignored(self, policy: EvictionPolicy) -> None:
        """It does not become a victim, and does not disturb the known ones beside it."""
        policy.insert(keys_of(1, 2), [MIB, MIB])
        policy.touch(keys_of(8, 1, 9, 2, 7))

        assert drain(policy) == keys_of(2, 1)

    def test_a_leased_chunk_is_skipped(self, policy: EvictionPolicy) -> None:
        """The next in order leaves in its stead."""
        keys = keys_of(1, 2, 3)
        policy.insert(keys, sizes_of(keys))

        assert policy.evict(all_but(keys[2])) == keys[1]

    def test_leased_chunks_keep_their_place(self, policy: EvictionPolicy) -> None:
        """When the leases end, those skipped are next, in their old order."""
        keys = keys_of(*range(8))
        policy.insert(keys, sizes_of(keys))
        policy.evict(all_but(*keys[5:]))
        policy.evict(all_but(*keys[5:]))

        assert drain(policy) == [*reversed(keys[5:]), *reversed(keys[:3])]

    def test_leases_may_end_one_by_one(self, policy: EvictionPolicy) -> None:
        """Each chunk takes its own place again."""
        keys = keys_of(*range(6))
        policy.insert(keys, sizes_of(keys))
        assert policy.evict(all_but(keys[5], keys[4])) == keys[3]
        assert policy.evict(all_but(keys[5])) == keys[4]
        assert policy.evict(all_but(keys[5])) == keys[2]
        assert drain(policy) == [keys[5], keys[1], keys[0]]

    def test_when_all_are_leased_there_is_no_victim(self, policy: EvictionPolicy) -> None:
        """And nothing is lost or moved by having asked."""
        keys = keys_of(*range(10))
        policy.insert(keys, sizes_of(keys))
        for _ in range(3):
            assert policy.evict(all_but(*keys)) is None

        assert drain(policy) == keys[::-1]

    @pytest.mark.parametrize("free", [0, 1500, 2999])
    def test_the_only_chunk_that_may_leave_is_found(
        self, policy: EvictionPolicy, free: int
    ) -> None:
        """However many leased ones stand around it, and however often they were skipped."""
        keys = keys_of(*range(3000))
        policy.insert(keys, [KIB] * 3000)
        for _ in range(3):
            assert policy.evict(all_but(*keys)) is None

        assert policy.evict(lambda key: key == keys[free]) == keys[free]

    def test_a_skipped_chunk_can_be_touched_and_removed(self, policy: EvictionPolicy) -> None:
        """Being skipped is no state that a caller can see."""
        keys = keys_of(1, 2, 3, 4)
        policy.insert(keys, sizes_of(keys))
        assert policy.evict(all_but(*keys)) is None
        policy.remove(keys[3:])
        policy.touch(keys[2:3])

        assert drain(policy) == [keys[1], keys[0], keys[2]]

    def test_removed_chunks_do_not_leave_again(self, policy: EvictionPolicy) -> None:
        """Removing the unknown, or twice, is ignored; any iterable will do."""
        keys = keys_of(*range(5))
        policy.insert(keys, sizes_of(keys))
        policy.touch(keys[:3])
        policy.remove(key for key in (keys[0], keys[4], *keys_of(9)))
        policy.remove([keys[0]])

        assert drain(policy) == keys[3:0:-1]

    def test_chunks_can_come_back(self, policy: EvictionPolicy) -> None:
        """After an eviction and after a removal, as often as they like."""
        keys = keys_of(1, 2)
        for _ in range(4):
            policy.insert(keys, sizes_of(keys))
            assert policy.evict(any_may_leave) == keys[1]
            policy.remove(keys[:1])
            assert policy.evict(any_may_leave) is None
