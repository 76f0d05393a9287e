"""`kvstrata demo`: caches thrown away and restored from every tier, with proof."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.bench.report import describe_machine
from kvstrata.cli.demo_view import DemoView, LiveView, PlainView
from kvstrata.cli.extras import torch_wanted
from kvstrata.cli.output import print_json, results
from kvstrata.showcase.events import PartialHit, Row
from kvstrata.showcase.models import MODELS, check_models
from kvstrata.showcase.places import TIERS, open_places

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata.showcase.events import Event
    from kvstrata.showcase.places import Places


@dataclass
class Outcome:
    """What was measured and compared."""

    rows: list[Row] = field(default_factory=list)
    partial_hits: list[PartialHit] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether everything that was compared is equal."""
        return all(row.is_right for row in self.rows) and all(
            hit.tokens_equal for hit in self.partial_hits
        )

    def note(self, event: Event) -> None:
        """Keep what is a result."""
        if isinstance(event, Row):
            self.rows.append(event)
        elif isinstance(event, PartialHit):
            self.partial_hits.append(event)


def demo(
    models: Annotated[
        str, typer.Option(metavar="A,B", help=f"Of {', '.join(MODELS)}.", show_default="all")
    ] = ",".join(MODELS),
    tiers: Annotated[
        str, typer.Option(metavar="A,B", help=f"Of {', '.join(TIERS)}.", show_default="all")
    ] = ",".join(TIERS),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve hybrid models, throw their caches away, restore them from every tier, and compare.

    Exit code 1: a byte, a score or a token was not the same.
    """
    chosen = models.split(",")
    check_models(chosen)
    start = time.perf_counter()
    outcome = Outcome()
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-demo-") as folder,
        open_places(tiers.split(","), Path(folder)) as places,
        _view(chosen, places, as_json=as_json) as view,
    ):
        for event in _events(chosen, places, Path(folder) / "models"):
            outcome.note(event)
            view.show(event)
    if as_json:
        print_json(_as_json(outcome, places, time.perf_counter() - start))
    if not outcome.is_right:
        raise typer.Exit(1)


def _events(models: Sequence[str], places: Places, folder: Path) -> Iterator[Event]:
    with torch_wanted():
        from kvstrata.showcase.restoring import restore_all  # noqa: PLC0415 - needs torch

    return restore_all(models, places.places, folder)


def _view(models: Sequence[str], places: Places, *, as_json: bool) -> DemoView:
    if as_json:
        return DemoView()
    console = results()
    return (LiveView if console.is_terminal else PlainView)(console, models, places)


def _as_json(outcome: Outcome, places: Places, seconds: float) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in outcome.rows],
        "partial_hits": [
            {name: value for name, value in asdict(hit).items() if name != "groups"}
            for hit in outcome.partial_hits
        ],
        "tiers": {place.tier: place.about for place in places.places},
        "skipped": [asdict(skipped) for skipped in places.skipped],
        "is_right": outcome.is_right,
        "seconds": seconds,
        "machine": describe_machine(),
    }
