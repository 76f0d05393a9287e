"""`kvstrata inspect`, `verify` and `gc`: look at a store, check it, bring it down to a size."""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kvstrata.cli.output import errors, print_json, results
from kvstrata.cli.store_tables import (
    print_collection,
    print_inspection,
    print_verification,
)
from kvstrata.config.units import ACCEPTED_SIZES, ByteSize
from kvstrata.errors import ConfigError
from kvstrata.operations.collection import collect_garbage
from kvstrata.operations.inspection import inspect
from kvstrata.operations.listing import no_progress
from kvstrata.operations.opening import directory_path, open_listing
from kvstrata.operations.store_json import (
    collection_json,
    inspection_json,
    verification_json,
)
from kvstrata.operations.verification import fix, verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata.operations.listing import OnProgress

PROBLEMS_FOUND: Final = 1
"""Exit code when the work was done and the store is not as it should be."""

StoreAddress = Annotated[
    str,
    typer.Argument(metavar="PATH_OR_URL", help="A directory, or file://, s3://, valkey:// ..."),
]
StorePath = Annotated[str, typer.Argument(metavar="PATH", help="A store's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def inspect_store(address: StoreAddress, as_json: AsJson = False) -> None:
    """Show what is in a store: namespaces, ranks, groups, sizes, leftovers. Changes nothing."""
    with closing(open_listing(address)) as listing, _progress("listing", as_json) as on_progress:
        found = inspect(listing, on_progress)
    if as_json:
        print_json(inspection_json(found))
    else:
        print_inspection(results(), found)


def verify_store(
    address: StoreAddress,
    fix_bad: Annotated[
        bool, typer.Option("--fix", help="Move bad chunks out of the way; correct the counter.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check it completely; exit code 1 when some are bad."""
    with closing(open_listing(address)) as listing:
        with _progress("verifying", as_json) as on_progress:
            found = verify(listing, on_progress)
        if fix_bad:
            found = fix(listing, found)
    if as_json:
        print_json(verification_json(found))
    else:
        print_verification(results(), found)
    if not found.is_clean:
        raise typer.Exit(PROBLEMS_FOUND)


def gc(
    path: StorePath,
    quota: Annotated[str, typer.Option("--quota", metavar="SIZE", help="As in 64GiB.")],
    as_json: AsJson = False,
) -> None:
    """Evict what was used longest ago down to a size; exit code 1 when that is not reached."""
    quota_bytes, root = _parse_size(quota), directory_path(path)
    with _progress("evicting", as_json) as on_progress:
        done = collect_garbage(root, quota_bytes, on_progress)
    if as_json:
        print_json(collection_json(done))
    else:
        print_collection(results(), done)
    if not (done.has_reached_quota and done.is_usage_right):
        raise typer.Exit(PROBLEMS_FOUND)


def _parse_size(text: str) -> int:
    try:
        return int(ByteSize.parse(text))
    except ValueError as error:
        problem = str(error).partition("; accepted:")[0]
        raise ConfigError("--quota", problem, ACCEPTED_SIZES) from error


@contextmanager
def _progress(what: str, as_json: bool) -> Iterator[OnProgress]:
    """A bar for somebody who is watching, gone when the work is done."""
    if as_json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield no_progress
        return
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
