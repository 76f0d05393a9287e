"""`kvstrata config`: check a file, explain it, print the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvstrata.cli.output import print_json, results
from kvstrata.config import parse_config, read_config
from kvstrata.config.explain import json_schema, settings
from kvstrata.config.parsing import read_mapping

app = typer.Typer(help="Check, explain and describe the configuration.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(help="A YAML or JSON file.", metavar="FILE")]


@app.command()
def check(file: ConfigFile) -> None:
    """Say whether a file is a valid configuration; exit code 2 when it is not."""
    config = read_config(file)
    tiers = ", ".join(["host", *(str(type(tier).__struct_config__.tag) for tier in config.tiers)])
    results().print(f"{file}: valid. Tiers: {tiers}", markup=False)


@app.command()
def explain(file: ConfigFile) -> None:
    """Show every setting in force: its value, where it comes from, what it means."""
    given = read_mapping(file)
    table = Table(
        "setting", "value", "from", "meaning", title=Text(str(file)), title_justify="left"
    )
    for setting in settings(parse_config(given), given):
        origin = "default" if setting.is_default else "file"
        style = "dim" if setting.is_default else None
        cells = (setting.path, setting.value, origin, setting.meaning)
        table.add_row(*map(Text, cells), style=style)  # Text: a user's brackets are no markup
    results().print(table)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors and validators."""
    print_json(json_schema())
