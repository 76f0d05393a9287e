"""What every `ChunkStore` must do, as a suite to inherit from.

    class TestMyStore(TierContract):
        @pytest.fixture
        def medium(self, tmp_path) -> Medium: ...

`Medium` opens stores over one shared place, and can reach behind them to damage what lies there.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

import pytest

from kvstrata.core.chunk_label import Rank
from kvstrata.errors import ChunkCorrupt, ClosedError, TierTimeout
from kvstrata.testing.chunks import a_label, a_namespace, content, empty, filled, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.core.chunk_label import Namespace
    from kvstrata.core.ids import ChunkKey
    from kvstrata.interfaces import ChunkStore

SIZES = (1, 4095, 4096, 10_000, 300_000)


class Medium(Protocol):
    """One place that several stores share."""

    def open(self, namespace: Namespace, rank: Rank) -> ChunkStore:
        """A store over this place."""
        ...

    def damage(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        """Replace a chunk's raw bytes (header page and payload) behind the store's back."""
        ...


class TierContract:
    """Inherit, and provide the fixture `medium`."""

    @pytest.fixture
    def store(self, medium: Medium) -> ChunkStore:
        """A store of one rank."""
        return medium.open(a_namespace(), Rank())

    @pytest.mark.parametrize("payload_bytes", SIZES)
    @pytest.mark.parametrize("num_parts", [1, 3])
    def test_what_was_written_is_read(
        self, store: ChunkStore, payload_bytes: int, num_parts: int
    ) -> None:
        """Bytes come back equal, in other parts too."""
        label = a_label(1, payload_bytes=payload_bytes)
        written, read = filled(label, num_parts=num_parts), empty(label, num_parts=4 - num_parts)

        assert store.write([written], within(10)).done == {label.key}
        assert store.read([read], within(10)).done == {label.key}
        assert content(read) == content(written)

    def test_a_batch_has_an_outcome_for_every_key(self, store: ChunkStore) -> None:
        """Present and absent ones in one read."""
        labels = [a_label(n, payload_bytes=5000 + n) for n in range(20)]
        store.write([filled(label) for label in labels[::2]], within(10))

        buffers = [empty(label) for label in labels]
        outcome = store.read(buffers, within(10))

        assert outcome.done == {label.key for label in labels[::2]}
        assert outcome.absent == {label.key for label in labels[1::2]}
        assert not outcome.failed
        for buffer in buffers[::2]:
            assert content(buffer) == content(filled(buffer.label))

    def test_an_empty_batch_does_nothing(self, store: ChunkStore) -> None:
        """No keys, no outcome."""
        for outcome in (
            store.read([], within(1)),
            store.write([], within(1)),
            store.find([], within(1)),
            store.remove([], within(1)),
        ):
            assert not outcome.done | outcome.absent | set(outcome.failed)

    def test_find_tells_present_from_absent(self, store: ChunkStore) -> None:
        """Without reading payloads."""
        here, gone = a_label(1), a_label(2)
        store.write([filled(here)], within(10))

        outcome = store.find([here.key, gone.key], within(10))

        assert outcome.done == {here.key}
        assert outcome.absent == {gone.key}

    def test_a_chunk_is_found_when_every_rank_has_it(self, medium: Medium) -> None:
        """A missing rank is a miss for all."""
        stores = [medium.open(a_namespace(), Rank(index, 2)) for index in range(2)]
        label = a_label(1)
        stores[0].write([filled(label, seed=0)], within(10))
        assert stores[0].find([label.key], within(10)).absent == {label.key}

        stores[1].write([filled(label, seed=1)], within(10))
        for index, store in enumerate(stores):
            buffer = empty(label)
            assert store.find([label.key], within(10)).done == {label.key}
            assert store.read([buffer], within(10)).done == {label.key}
            assert content(buffer) == content(filled(label, seed=index))

    def test_namespaces_do_not_meet(self, medium: Medium) -> None:
        """The same key under other weights is another chunk."""
        label = a_label(1)
        one = medium.open(a_namespace("one"), Rank())
        other = medium.open(a_namespace("other"), Rank())
        one.write([filled(label, seed=1)], within(10))

        assert other.read([empty(label)], within(10)).absent == {label.key}
        other.write([filled(label, seed=2)], within(10))
        buffer = empty(label)
        one.read([buffer], within(10))
        assert content(buffer) == content(filled(label, seed=1))

    def test_parallel_layouts_do_not_meet(self, medium: Medium) -> None:
        """One rank of one is not one rank of two."""
        label = a_label(1)
        medium.open(a_namespace(), Rank(0, 1)).write([filled(label)], within(10))

        other = medium.open(a_namespace(), Rank(0, 2))
        assert other.read([empty(label)], within(10)).absent == {label.key}

    def test_groups_do_not_meet(self, store: ChunkStore) -> None:
        """Two groups may have chunks that end at the same token."""
        one, other = a_label(1, group=0), a_label(1, group=1)
        store.write([filled(one)], within(10))

        assert store.find([one.key, other.key], within(10)).absent == {other.key}

    def test_another_store_over_the_same_place_reads_it(self, medium: Medium) -> None:
        """What one wrote the other reads, also after a close."""
        label = a_label(1)
        first = medium.open(a_namespace(), Rank())
        first.write([filled(label)], within(10))
        first.close()

        buffer = empty(label)
        second = medium.open(a_namespace(), Rank())
        assert second.read([buffer], within(10)).done == {label.key}
        assert content(buffer) == content(filled(label))

    def test_writing_again_leaves_one_good_chunk(self, store: ChunkStore) -> None:
        """Equal keys mean equal bytes, so either copy is right; a mixture is not."""
        label = a_label(1)
        store.write([filled(label, seed=1)], within(10))
        assert store.write([filled(label, seed=2)], within(10)).done == {label.key}

        buffer = empty(label)
        assert store.read([buffer], within(10)).done == {label.key}
        assert content(buffer) in {content(filled(label, seed=s)) for s in (1, 2)}

    def test_removed_chunks_are_absent(self, store: ChunkStore) -> None:
        """Removing what is not there is an absence, not a fault."""
        here, gone = a_label(1), a_label(2)
        store.write([filled(here)], within(10))

        outcome = store.remove([here.key, gone.key], within(10))

        assert outcome.done == {here.key}
        assert outcome.absent == {gone.key}
        assert store.read([empty(here)], within(10)).absent == {here.key}

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda raw: raw[:-1], id="truncated"),
            pytest.param(lambda raw: raw + b"x", id="grown"),
            pytest.param(lambda _: b"", id="emptied"),
            pytest.param(lambda raw: raw[:4096], id="payload cut off"),
            pytest.param(lambda raw: _flip(raw, 0), id="flipped magic"),
            pytest.param(lambda raw: _flip(raw, 9), id="flipped version"),
            pytest.param(lambda raw: _flip(raw, 60), id="flipped header"),
            pytest.param(lambda raw: _flip(raw, 4000), id="flipped header padding"),
            pytest.param(lambda raw: _flip(raw, 4096), id="flipped first byte"),
            pytest.param(lambda raw: _flip(raw, len(raw) - 1), id="flipped last byte"),
            pytest.param(lambda raw: bytes(len(raw)), id="zeroed"),
        ],
    )
    def test_damage_is_never_served(self, medium: Medium, change: Callable[[bytes], bytes]) -> None:
        """The fault names the key; the other chunks of the batch are served."""
        store = medium.open(a_namespace(), Rank())
        bad, good = a_label(1), a_label(2)
        store.write([filled(bad), filled(good)], within(10))
        medium.damage(bad.key, change)

        buffer = empty(good)
        outcome = store.read([empty(bad), buffer], within(10))

        assert outcome.done == {good.key}
        assert isinstance(outcome.failed[bad.key], ChunkCorrupt)
        assert bad.key in outcome.failed[bad.key].keys
        assert content(buffer) == content(filled(good))

    def test_a_chunk_in_anothers_place_is_not_served(self, medium: Medium) -> None:
        """Swapped files or objects: whole, but not what was asked for."""
        store = medium.open(a_namespace(), Rank())
        one, other = a_label(1), a_label(2)
        store.write([filled(one), filled(other)], within(10))
        raw: list[bytes] = []

        def copied(data: bytes) -> bytes:
            raw.append(data)
            return data

        medium.damage(other.key, copied)
        medium.damage(one.key, lambda _: raw[0])

        outcome = store.read([empty(one)], within(10))

        assert isinstance(outcome.failed[one.key], ChunkCorrupt)

    def test_a_label_that_differs_is_not_served(self, store: ChunkStore) -> None:
        """The same key with another size is refused, whatever the reader expects."""
        store.write([filled(a_label(1, payload_bytes=10_000))], within(10))
        other = a_label(1, payload_bytes=9_999)

        outcome = store.read([empty(other)], within(10))

        assert isinstance(outcome.failed[other.key], ChunkCorrupt)

    def test_damage_can_be_written_over(self, medium: Medium) -> None:
        """A bad chunk does not stay in the way of a good one."""
        store = medium.open(a_namespace(), Rank())
        label = a_label(1)
        store.write([filled(label)], within(10))
        medium.damage(label.key, lambda raw: raw[:100])
        store.read([empty(label)], within(10))

        store.write([filled(label)], within(10))

        assert store.read([empty(label)], within(10)).done == {label.key}

    def test_concurrent_writers_of_one_key_end_with_one_good_chunk(self, medium: Medium) -> None:
        """Several stores, several threads, one key."""
        label = a_label(1, payload_bytes=50_000)
        stores = [medium.open(a_namespace(), Rank()) for _ in range(4)]

        def write(index: int) -> None:
            for _ in range(5):
                stores[index].write([filled(label, seed=index)], within(20))

        threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        buffer = empty(label)
        assert stores[0].read([buffer], within(10)).done == {label.key}
        assert content(buffer) in {content(filled(label, seed=index)) for index in range(4)}

    def test_a_deadline_in_the_past_is_kept(self, store: ChunkStore) -> None:
        """Nothing is started, nothing is waited for."""
        label = a_label(1)
        store.write([filled(label)], within(10))
        late = within(-1)
        start = time.monotonic()
        for outcome in (
            store.read([empty(label)], late),
            store.write([filled(label)], late),
            store.find([label.key], late),
            store.remove([label.key], late),
        ):
            assert isinstance(outcome.failed[label.key], TierTimeout)
        assert time.monotonic() - start < 5
        assert store.read([empty(label)], within(10)).done == {label.key}

    def test_close_is_final_and_idempotent(self, store: ChunkStore) -> None:
        """Used after close: an error of the caller's."""
        store.close()
        store.close()
        label = a_label(1)
        with pytest.raises(ClosedError):
            store.read([empty(label)], within(1))
        with pytest.raises(ClosedError):
            store.write([filled(label)], within(1))
        with pytest.raises(ClosedError):
            store.find([label.key], within(1))
        with pytest.raises(ClosedError):
            store.remove([label.key], within(1))


def _flip(raw: bytes, offset: int) -> bytes:
    return raw[:offset] + bytes([raw[offset] ^ 0x40]) + raw[offset + 1 :]
