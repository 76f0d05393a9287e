"""`kvstrata bench`: measure, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvstrata.cli.output import print_json, results

if TYPE_CHECKING:
    from kvstrata.bench.report import Report, Series

app = typer.Typer(help="Measure against stated goals.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def planning(as_json: AsJson = False) -> None:
    """What planning costs the scheduler thread, and how it grows with the prompt."""
    from kvstrata.bench import planning as benchmark  # noqa: PLC0415 - load what runs

    show(benchmark.run(), as_json=as_json)


@app.command()
def filesystem(
    as_json: AsJson = False,
    folder: Annotated[Path, typer.Option(help="Where temporary files go.")] = Path(),
    num_listed: Annotated[int, typer.Option(help="Chunks to list.")] = 1_000_000,
) -> None:
    """What the filesystem tier reaches of what its file system gives."""
    from kvstrata.bench import filesystem as benchmark  # noqa: PLC0415 - load what runs

    show(benchmark.run(benchmark.Scale(num_listed=num_listed), folder), as_json=as_json)


@app.command()
def host(as_json: AsJson = False) -> None:
    """What host memory costs: look-ups, room and copies."""
    from kvstrata.bench import host as benchmark  # noqa: PLC0415 - load what runs

    show(benchmark.run(), as_json=as_json)


@app.command()
def engine(as_json: AsJson = False) -> None:
    """What the embedded engine costs: scheduling, and prefills beside transformers."""
    from kvstrata.bench import engine as benchmark  # noqa: PLC0415 - load what runs

    show(benchmark.run(), as_json=as_json)


@app.command()
def runtime(as_json: AsJson = False) -> None:
    """What offloading costs an engine that gets nothing out of it."""
    from kvstrata.bench import runtime as benchmark  # noqa: PLC0415 - load what runs

    show(benchmark.run(), as_json=as_json)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report for programs or for people."""
    if as_json:
        print_json(report.as_json())
        return
    console = results()
    console.print(f"[bold]{report.name}[/]: {report.setting}")
    table = Table("figure", "measured", "goal", "unit", "met")
    for goal in report.goals:
        met = "[green]yes[/]" if goal.met else "[red]no[/]"
        bound = f"{goal.direction} {goal.goal:g}"
        table.add_row(goal.name, f"{goal.value:.3g}", bound, goal.unit, met)
    console.print(table)
    for series in report.series:
        console.print(_series_table(series))
    machine = report.machine
    console.print(f"[dim]{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}[/]")


def _series_table(series: Series) -> Table:
    table = Table(title=series.title, title_justify="left")
    for name in (series.size_name, *series.columns):
        table.add_column(name, justify="right")
    for size, values in series.rows:
        name = size if isinstance(size, str) else f"{size:,}"
        table.add_row(name, *(f"{value:.3g}" for value in values))
    return table
