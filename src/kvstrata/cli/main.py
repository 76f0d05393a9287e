"""The `kvstrata` command: wires the subcommands together and turns errors into messages."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer
from rich.text import Text

from kvstrata import __version__
from kvstrata.cli import bench, config, demo, engine, store_commands
from kvstrata.cli.output import errors
from kvstrata.errors import KVStrataError

USAGE_ERROR: Final = 2
"""Exit code for wrong input, as shells and typer use it."""

app = typer.Typer(
    name="kvstrata",
    help="KV-cache offloading for hybrid LLMs: correct, in time, or not at all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(engine.app, name="engine")
app.command("demo")(demo.demo)
app.command("inspect")(store_commands.inspect_store)
app.command("verify")(store_commands.verify_store)
app.command("gc")(store_commands.gc)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """KV-cache offloading for hybrid LLMs: correct, in time, or not at all."""


def main() -> None:
    """Run the command; an error of ours is a message and exit code 2, not a traceback."""
    try:
        app()
    except KVStrataError as error:
        errors().print(Text.assemble(("error:", "bold red"), f" {error}"))
        sys.exit(USAGE_ERROR)
