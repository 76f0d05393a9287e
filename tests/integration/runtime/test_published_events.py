"""An engine that publishes its own events: a subscriber knows what rests where, exactly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstrata.config.parsing import parse_config
from kvstrata.core.ids import key_group, key_hash
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.offloading import offloading
from kvstrata.engine.tiny import make_tiny
from kvstrata.runtime.scheduler_side import SchedulerSide
from kvstrata.telemetry.event_subscriber import EventSubscriber

if TYPE_CHECKING:
    from pathlib import Path


def test_a_subscriber_follows_an_engine_over_a_socket(tmp_path: Path) -> None:
    make_tiny("lfm2", tmp_path / "model")
    config = parse_config(
        {
            "host": {"capacity": "1MiB"},
            "hybrid_chunk_size": 32,
            "load": {"decide": "always"},
            "events": {
                "self_describing": True,
                "endpoint": f"ipc://{tmp_path}/events",
                "replay_endpoint": f"ipc://{tmp_path}/replay",
            },
        }
    )
    parts = offloading(config, tmp_path / "model")
    with Engine(tmp_path / "model", EngineOptions(num_blocks=200), parts) as engine:
        side = engine._connector  # noqa: SLF001 - what is inside is what is compared
        assert isinstance(side, SchedulerSide)
        subscriber = EventSubscriber(
            f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay"
        )
        prompts = [[(3 * i + n) % 256 for i in range(150)] for n in range(3)]
        engine.generate(prompts, SamplingParams(max_tokens=4))
        engine.run_until_idle()
        wanted = {(key_group(key), bytes(key_hash(key))) for key in side.host_keys()}

        found: set[tuple[int | None, object]] = set()
        end = time.monotonic() + 20
        while not (subscriber.consumer.is_exact and wanted <= found) and time.monotonic() < end:
            subscriber.poll(0.1)
            found = {(a.group_idx, a.block_hash) for a in subscriber.consumer.index}

        assert wanted
        assert subscriber.consumer.is_exact
        assert wanted <= found
        assert side.take_events() == ()
        subscriber.close()
