"""How the demo looks: a table that fills in a terminal, lines elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Self

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvstrata.core.spans import ceil_div
from kvstrata.showcase.events import Mark, PartialHit, Phase, Recomputed, Row, num_phases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from kvstrata.showcase.events import Event, GroupPicture
    from kvstrata.showcase.places import Places

INTRODUCTION: Final = (
    "Each model serves a prompt. Its KV cache is stored below the device, then the device's memory "
    "is overwritten with rubbish and the prompt served again from one tier alone. From the tiers "
    "below host memory a new engine restores, which has never seen the prompt. Compared: the "
    "device's bytes with those of the cold run, every score with that of a run whose cache was "
    "never lost, the answer with that of an engine without offloading."
)
_FRAMES_PER_S: Final = 10
_STRIP_COLUMNS: Final = 64
_WIDE_COLUMNS: Final = 100
_MARKS: Final = {
    Mark.REMOVED: ("✗", "bold red"),
    Mark.LOADED: ("█", "green"),
    Mark.STORED: ("▒", "green"),
    Mark.ABSENT: ("·", "bright_black"),
}
"""The most telling first."""


class DemoView:
    """Nobody is watching."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, event: Event) -> None:
        """Something happened."""


class PlainView(DemoView):
    """A line for each result, and the whole table in the end.

    Args:
        console: where to.
        models: what is shown.
        places: where from.
    """

    def __init__(self, console: Console, models: Sequence[str], places: Places) -> None:
        self._console = console
        self._board = Board(models, places)

    def __enter__(self) -> Self:
        self._console.print(INTRODUCTION, soft_wrap=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            table = self._board.table(width=self._console.width)
            self._console.print(table, *self._board.remarks())

    def show(self, event: Event) -> None:
        """Print results."""
        self._board.note(event)
        if isinstance(event, Row):
            self._console.print(_line(event), soft_wrap=True)


class LiveView(DemoView):
    """A table that fills while one looks.

    Args:
        console: the terminal.
        models: what is shown.
        places: where from.
    """

    def __init__(self, console: Console, models: Sequence[str], places: Places) -> None:
        self._console = console
        self._board = Board(models, places)
        self._bar = ProgressBar(num_phases(len(models), len(places.places)))
        self._spinner = Spinner("dots")
        self._is_over = False
        self._live = Live(
            console=console, refresh_per_second=_FRAMES_PER_S, get_renderable=self._picture
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._live.stop()

    def show(self, event: Event) -> None:
        """Draw."""
        self._board.note(event)
        if isinstance(event, Phase):
            self._spinner.update(text=Text.assemble((event.model, "bold"), f": {event.text}"))
            self._bar.update(self._bar.completed + 1)
        self._live.refresh()

    def _picture(self) -> RenderableType:
        table = self._board.table(width=self._console.width)
        parts: list[RenderableType] = [Text(INTRODUCTION, style="italic"), table]
        if not self._is_over:
            parts += [self._spinner, self._bar]
        return Group(*parts, *self._board.remarks())


class Board:
    """All results so far, as they are drawn.

    Args:
        models: one row each.
        places: one column each.
    """

    def __init__(self, models: Sequence[str], places: Places) -> None:
        self._models = models
        self._places = places
        self._recomputed: dict[str, Recomputed] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        self._partial_hits: list[PartialHit] = []

    def note(self, event: Event) -> None:
        """Remember what is to be drawn."""
        if isinstance(event, Recomputed):
            self._recomputed[event.model] = event
        elif isinstance(event, Row):
            self._rows[event.model, event.tier] = event
        elif isinstance(event, PartialHit):
            self._partial_hits.append(event)

    def table(self, *, width: int) -> Table:
        """One row per model, one column per tier."""
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column("model", no_wrap=True)
        is_wide = width >= _WIDE_COLUMNS
        if is_wide:
            table.add_column("groups", style="dim", no_wrap=True)
        table.add_column("recompute", justify="right", no_wrap=True)
        for place in self._places.places:
            table.add_column(place.tier, justify="right", no_wrap=True)
        for model in self._models:
            known = self._recomputed.get(model)
            kinds, cost = ("", "") if known is None else (_kinds(known), _ms(known.seconds))
            cells = [self._cell(model, place.tier) for place in self._places.places]
            table.add_row(model, *[kinds] * is_wide, cost, *cells)
        return table

    def remarks(self) -> list[RenderableType]:
        """What has to be said besides."""
        remarks: list[RenderableType] = [_legend(self._places)]
        remarks += [_partial_hit(hit) for hit in self._partial_hits]
        if self._rows and self._partial_hits:
            remarks.append(_verdict(list(self._rows.values()), self._partial_hits))
        return remarks

    def _cell(self, model: str, tier: str) -> Text:
        row = self._rows.get((model, tier))
        if row is None:
            return Text("")
        mark = ("✓", "bold green") if row.is_right else ("✗ " + _wrong(row), "bold red")
        return Text.assemble(
            _ms(row.restore_s), (f" {row.recompute_s / row.restore_s:.0f}x ", "cyan"), mark
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _kinds(known: Recomputed) -> str:
    """As in "full, 3 recurrent"."""
    counts = Counter(known.kinds)
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in counts.items())


def _wrong(row: Row) -> str:
    """What is not the same."""
    facts = {"bytes": row.bytes_equal, "logits": row.logits_equal, "tokens": row.tokens_equal}
    return ", ".join(name for name, is_equal in facts.items() if not is_equal)


def _line(row: Row) -> Text:
    verdict = (
        ("bytes, logits and tokens are the same", "green")
        if row.is_right
        else (f"not the same: {_wrong(row)}", "bold red")
    )
    return Text.assemble(
        f"{row.model} from {row.tier}: {row.restored_tokens:,} tokens "
        f"({row.restored_bytes / 2**20:.1f} MiB) in {_ms(row.restore_s)} instead of "
        f"{_ms(row.recompute_s)}; ",
        verdict,
    )


def _legend(places: Places) -> Text:
    text = Text("Time to the first token; ✓ every byte, logit and token is the same", style="dim")
    for place in places.places:
        text.append(f"; {place.tier}: {place.about}")
    for skipped in places.skipped:
        text.append(f"\n{skipped.tier} was left out: {skipped.reason}", style="yellow")
    return text


def _partial_hit(hit: PartialHit) -> Panel:
    """What one lost chunk costs, and why."""
    verdict = (
        Text("The answer is the same.", style="bold green")
        if hit.tokens_equal
        else Text("The answer is not the same!", style="bold red")
    )
    legend = Text()
    for mark, (sign, style) in _MARKS.items():
        legend.append(f"{sign} ", style)
        legend.append(f"{mark.value}   ")
    return Panel(
        Group(
            f"{hit.removed.capitalize()} was removed from disk.",
            *(_strip(group) for group in hit.groups),
            legend,
            Text(hit.explanation, style="cyan"),
            verdict,
        ),
        title=f"{hit.model}: one chunk is lost for good",
        title_align="left",
    )


def _strip(group: GroupPicture) -> Text:
    """A group's chunks along the prompt; of several in one cell, the most telling is drawn."""
    strip = Text(f"{group.kind:<10}", style="bold")
    per_cell = ceil_div(len(group.marks), _STRIP_COLUMNS // 2)
    firsts = range(0, len(group.marks), per_cell)
    width = _STRIP_COLUMNS // len(firsts) - 1
    order = list(_MARKS)
    for first in firsts:
        sign, style = _MARKS[min(group.marks[first : first + per_cell], key=order.index)]
        strip.append(f"{sign * width} ", style)
    return strip


def _verdict(rows: Sequence[Row], hits: Sequence[PartialHit]) -> Text:
    wrong = [row for row in rows if not row.is_right]
    if wrong or not all(hit.tokens_equal for hit in hits):
        return Text(f"{len(wrong)} of {len(rows)} restores are wrong.", style="bold red")
    gains = sorted(row.recompute_s / row.restore_s for row in rows)
    return Text(
        f"{len(rows)} restores, all right; {gains[len(gains) // 2]:.0f} times as fast as "
        f"recomputing in the middle, {gains[0]:.1f} times at worst.",
        style="bold green",
    )
