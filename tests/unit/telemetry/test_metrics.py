from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstrata.telemetry import metrics
from kvstrata.telemetry.metrics import METRICS, Counters, Sample, increments
from kvstrata.telemetry.prometheus import SnapshotCollector


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names)) > 20
    for metric in METRICS:
        assert metric.name.startswith("kvstrata_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_counters_add_up_by_label() -> None:
    counters = Counters()
    counters.add(metrics.HIT_TOKENS, 16, "host")
    counters.add(metrics.HIT_TOKENS, 32, "disk")
    counters.add(metrics.HIT_TOKENS, 1, "host")

    assert counters.value(metrics.HIT_TOKENS, "host") == 17
    assert counters.total(metrics.HIT_TOKENS) == 49
    assert counters.value(metrics.LOOKUPS) == 0


def test_a_counter_never_goes_down_and_has_all_its_labels() -> None:
    counters = Counters()

    with pytest.raises(AssertionError):
        counters.add(metrics.LOOKUPS, -1)
    with pytest.raises(AssertionError):
        counters.add(metrics.HIT_TOKENS, 1)


def test_a_snapshot_travels_as_data() -> None:
    counters = Counters()
    counters.add(metrics.TIER_FAULTS, 2, "disk", "TierTimeout")

    data = msgspec.msgpack.encode(counters.snapshot())

    assert msgspec.msgpack.decode(data, type=list[Sample]) == counters.snapshot()


def test_increments_between_two_snapshots() -> None:
    counters = Counters()
    counters.add(metrics.LOOKUPS, 3)
    counters.set(metrics.PENDING, 5, "loads")
    before = counters.snapshot()
    counters.add(metrics.LOOKUPS, 4)
    counters.add(metrics.EVICTIONS, 1, "host")
    counters.set(metrics.PENDING, 2, "loads")

    new = {
        (sample.name, *sample.labels): sample.value
        for sample in increments(before, counters.snapshot())
    }

    assert new == {
        ("kvstrata_lookups_total",): 4,
        ("kvstrata_evictions_total", "host"): 1,
        ("kvstrata_pending", "loads"): 2,
    }


def test_prometheus_reads_the_newest_snapshot() -> None:
    counters = Counters()
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(counters.snapshot))
    counters.add(metrics.READ_BYTES, 4096, "disk")
    counters.set(metrics.PENDING, 1, "stores")

    text = generate_latest(registry).decode()

    assert 'kvstrata_read_bytes_total{tier="disk"} 4096.0' in text
    assert 'kvstrata_pending{what="stores"} 1.0' in text
    assert "kvstrata_lookups_total" not in text
