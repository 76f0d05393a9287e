"""What another model stored is not used, not overwritten, not deleted, and still its owner's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from kvstrata.engine import EngineOptions
from kvstrata.engine.tiny import make_tiny
from kvstrata.telemetry import metrics
from kvstrata.testing.servers import HOST

from .support import Bed, expected_of, tokens_of

if TYPE_CHECKING:
    from kvstrata.testing.servers import ServerProcess

    from .conftest import Models, Tiers

PROMPT = tokens_of(200)
HIT = 192


def another_dtype(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    del folder
    return model, EngineOptions(num_blocks=400, dtype="bfloat16")


def other_weights(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    """The same name and the same configuration, to the byte."""
    other = folder / model.name
    make_tiny("llama", other, seed=1)
    assert (other / "config.json").read_bytes() == (model / "config.json").read_bytes()
    return other, EngineOptions(num_blocks=400)


def another_model(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    del model
    make_tiny("mistral", folder / "mistral")
    return folder / "mistral", EngineOptions(num_blocks=400)


def another_position_encoding(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    """The same weights, read differently."""
    other = folder / "model"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_theta"] = 5.0
    (other / "config.json").write_text(json.dumps(config))
    return other, EngineOptions(num_blocks=400)


def other_blocks(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    del folder
    return model, EngineOptions(num_blocks=400, kernel_block_tokens=32)


def another_parallel_layout(model: Path, folder: Path) -> tuple[Path, EngineOptions]:
    del folder
    return model, EngineOptions(num_blocks=400, num_ranks=2)


OTHERS = [
    another_dtype,
    other_weights,
    another_model,
    another_position_encoding,
    other_blocks,
    pytest.param(another_parallel_layout, marks=pytest.mark.slow),
]


def contents(store: Path) -> dict[str, tuple[bytes, int]]:
    """Every chunk's file with its bytes and the time of its last change."""
    return {
        str(path.relative_to(store)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in store.glob("namespaces/*/*/*")
        if path.is_file()
    }


@pytest.mark.parametrize("change", OTHERS)
def test_a_directory(change: Any, model: Models, tier: Tiers, tmp_path: Path) -> None:  # noqa: ANN401
    place = tier("filesystem")
    assert place is not None
    store = Path(place["path"])
    owner = model("llama")
    with Bed(owner, place) as bed:
        mine = bed.ask(PROMPT)
    before = contents(store)
    other, options = change(owner, tmp_path / "other")
    wanted = expected_of(other, PROMPT, options)
    with Bed(other, place, options=options) as bed:
        cold = bed.ask(PROMPT)
        assert (cold.tokens, cold.external_hit_tokens) == (wanted.tokens, 0)
        assert bed.count(metrics.READ_BYTES) == 0
        bed.drop_host()
        warm = bed.ask(PROMPT)
        assert warm.tokens == wanted.tokens
        assert warm.external_hit_tokens == wanted.hit_tokens, "its own it does use"
    after = contents(store)
    names = [path.name for path in (store / "namespaces").iterdir()]

    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    assert len(names) == 2
    assert not list((store / "quarantine").iterdir())
    with Bed(owner, place) as bed:
        again = bed.ask(PROMPT)
        assert (again.tokens, again.external_hit_tokens) == (mine.tokens, HIT)


def values(client: Redis) -> dict[bytes, object]:
    """Everything in a database, by name."""
    names: list[bytes] = list(client.scan_iter())
    return {name: client.get(name) for name in names}


def test_a_server(model: Models, tier: Tiers, redis: ServerProcess, tmp_path: Path) -> None:
    place = tier("valkey")
    assert place is not None
    with Redis(HOST, redis.port, db=int(place["url"].rpartition("/")[2])) as client:
        client.flushdb()
        with Bed(model("llama"), place) as bed:
            mine = bed.ask(PROMPT)
        before = values(client)
        other, options = other_weights(model("llama"), tmp_path / "other")
        wanted = expected_of(other, PROMPT)
        with Bed(other, place, options=options) as bed:
            cold = bed.ask(PROMPT)
            assert (cold.tokens, cold.external_hit_tokens) == (wanted.tokens, 0)
        after = values(client)

        assert before
        assert {name: after[name] for name in before} == before
        assert len(after) == 2 * len(before)
    with Bed(model("llama"), place) as bed:
        again = bed.ask(PROMPT)
        assert (again.tokens, again.external_hit_tokens) == (mine.tokens, HIT)


def test_files_of_another_model_under_this_ones_names(
    model: Models, tier: Tiers, tmp_path: Path
) -> None:
    """Somebody copied the files over: what the headers say counts."""
    place = tier("filesystem")
    assert place is not None
    store = Path(place["path"])
    other, _ = other_weights(model("llama"), tmp_path / "other")
    with Bed(other, place) as bed:
        bed.ask(PROMPT)
    [theirs] = (store / "namespaces").iterdir()
    wanted = expected_of(model("llama"), PROMPT)
    with Bed(model("llama"), place) as bed:
        [mine] = set((store / "namespaces").iterdir()) - {theirs}
        shutil.copytree(theirs, mine, dirs_exist_ok=True)
        answer = bed.ask(PROMPT)

        assert (answer.tokens, answer.external_hit_tokens) == (wanted.tokens, 0)
        assert bed.count(metrics.TIER_FAULTS, "filesystem", "ChunkCorrupt") > 0
