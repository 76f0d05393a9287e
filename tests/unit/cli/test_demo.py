from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvstrata.cli import demo, demo_view
from kvstrata.cli.main import app
from kvstrata.core.layout import GroupKind
from kvstrata.showcase import restoring
from kvstrata.showcase.events import Event, GroupPicture, Mark, PartialHit, Phase, Recomputed, Row
from kvstrata.showcase.places import Place, Places, Skipped, open_places
from kvstrata.transfers import copiers
from kvstrata.transfers.plain_copier import PlainCopier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.transfers.copy_queue import ChunkCopy

FIGURES = {
    "model": str,
    "tier": str,
    "restored_tokens": int,
    "restored_bytes": int,
    "recompute_s": float,
    "restore_s": float,
    "bytes_equal": bool,
    "logits_equal": bool,
    "tokens_equal": bool,
}
PLACES = Places(
    (Place("host", "host memory"), Place("valkey", "a server", {})), (Skipped("s3", "no"),)
)
RIGHT = Row(
    "lfm2",
    "host",
    2048,
    3 * 2**20,
    1.5,
    0.05,
    bytes_equal=True,
    logits_equal=True,
    tokens_equal=True,
)
WRONG = replace(RIGHT, tier="valkey", logits_equal=False)
PICTURES = (
    GroupPicture(GroupKind.FULL, 512, (Mark.LOADED, Mark.LOADED, Mark.STORED, Mark.STORED)),
    GroupPicture(
        GroupKind.RECURRENT,
        16,
        (Mark.ABSENT,) * 63 + (Mark.LOADED,) + (Mark.ABSENT,) * 63 + (Mark.REMOVED,),
    ),
)
PARTIAL = PartialHit(
    "lfm2", "the state at 2,048", 2060, 1024, "because of this", tokens_equal=True, groups=PICTURES
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "PROMPT_TOKENS", 524)
    monkeypatch.setattr(restoring, "BEST_OF", 2)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["demo", *options])


def run_json(*options: str) -> dict[str, Any]:
    result = run("--json", *options)
    data: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if data["is_right"] else 1)
    return data


def test_a_hybrid_model_is_restored_from_memory_and_disk() -> None:
    data = run_json("--models", "lfm2", "--tiers", "host,filesystem")

    assert [(row["model"], row["tier"]) for row in data["rows"]] == [
        ("lfm2", "host"),
        ("lfm2", "filesystem"),
    ]
    for row in data["rows"]:
        assert {name: type(value) for name, value in row.items()} == FIGURES
        assert row["restored_tokens"] == 512
        assert row["restored_bytes"] > 2**20
        assert row["restore_s"] > 0
        assert row["recompute_s"] > 0
        assert row["bytes_equal"]
        assert row["logits_equal"]
        assert row["tokens_equal"]
    assert data["skipped"] == []
    [partial] = data["partial_hits"]
    assert partial["restored_tokens"] == 0
    assert partial["tokens_equal"]
    assert "recurrent group 1 has no state at 512 (absent)" in partial["explanation"]


def test_a_flipped_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = PlainCopier.load

    def flip(self: PlainCopier, copy: ChunkCopy) -> None:
        part = self._parts(copy)[0]
        part[0] ^= 1
        load(self, copy)
        part[0] ^= 1

    monkeypatch.setattr(PlainCopier, "load", flip)
    monkeypatch.setattr(copiers, "native_rows", lambda: None)
    data = run_json("--models", "llama", "--tiers", "host")

    [row] = data["rows"]
    assert not row["bytes_equal"]
    assert not data["is_right"]


def test_a_restore_that_brings_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainCopier, "load", lambda *_: None)
    monkeypatch.setattr(copiers, "native_rows", lambda: None)
    data = run_json("--models", "llama", "--tiers", "host")

    [row] = data["rows"]
    assert not row["bytes_equal"]
    assert not row["logits_equal"]
    assert not row["tokens_equal"]


def test_what_is_not_installed_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    found = {"redis": object(), "obstore": None}
    monkeypatch.setattr("importlib.util.find_spec", found.get)

    with open_places(["host", "valkey", "object_store"], tmp_path) as places:
        assert [place.tier for place in places.places] == ["host"]
        reasons = {skipped.tier: skipped.reason for skipped in places.skipped}
    assert reasons == {
        "valkey": "neither redis-server nor valkey-server is installed",
        "object_store": "obstore is not installed: pip install 'kvstrata[s3]'",
    }


def test_without_an_s3_server_objects_go_to_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "moto" else real(name)
    )

    [row] = run_json("--models", "llama", "--tiers", "object_store")["rows"]

    assert row["restored_tokens"] == 512
    assert row["bytes_equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["gemma3", "qwen3_next", "granite_hybrid", "deepseek_v3", "mistral"]
)
def test_every_model_is_restored_from_every_tier(model: str) -> None:
    data = run_json("--models", model)

    assert [row["tier"] for row in data["rows"]] == ["host", "filesystem", "valkey", "object_store"]
    assert all(row["restored_tokens"] == 512 for row in data["rows"])
    assert data["is_right"]


@pytest.mark.parametrize("options", [("--models", "gpt2"), ("--tiers", "tape")])
def test_what_is_not_shown_is_refused(options: tuple[str, str]) -> None:
    result = run(*options)

    assert result.exit_code != 0
    assert options[1] in str(result.exception)


def drawn(
    view: type[demo_view.PlainView | demo_view.LiveView], *events: Event, width: int = 80
) -> str:
    is_live = view is demo_view.LiveView
    console = Console(width=width, record=True, force_terminal=is_live, file=io.StringIO())
    with view(console, ["lfm2"], PLACES) as shown:
        for event in events:
            shown.show(event)
    return console.export_text()


EVENTS = (
    Phase("lfm2", "compute"),
    Recomputed("lfm2", (GroupKind.FULL, GroupKind.RECURRENT, GroupKind.RECURRENT), 1.5),
    RIGHT,
    Phase("lfm2", "restore"),
)


@pytest.mark.parametrize("view", [demo_view.PlainView, demo_view.LiveView])
def test_views_show_times_and_verdicts(view: type[demo_view.PlainView]) -> None:
    text = drawn(view, *EVENTS, PARTIAL, width=120)

    assert "50 ms 30x ✓" in text
    assert "full, 2 recurrent" in text
    assert "s3 was left out: no" in text
    assert "because of this" in text
    assert "1 restores, all right" in text


def test_a_wrong_restore_stands_out() -> None:
    text = drawn(demo_view.PlainView, *EVENTS, WRONG, PARTIAL)

    assert "✗ logits" in text
    assert "not the same: logits" in text
    assert "1 of 2 restores are wrong" in text


def test_a_picture_fits_however_many_chunks_there_are() -> None:
    text = drawn(demo_view.PlainView, *EVENTS, PARTIAL)

    [strip] = [line for line in text.splitlines() if "recurrent " in line and "✗" in line]
    assert strip.count("█") == 1
    assert len(strip) <= 80


def test_only_results_decide() -> None:
    outcome = demo.Outcome()
    for event in EVENTS:
        outcome.note(event)
    assert outcome.is_right

    outcome.note(WRONG)
    assert not outcome.is_right
