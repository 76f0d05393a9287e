"""Stores as people read them. Names and addresses are text, never markup."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from kvstrata.operations.listing import shown_name

if TYPE_CHECKING:
    from rich.console import Console

    from kvstrata.operations.collection import Collection
    from kvstrata.operations.inspection import GroupSummary, Inspection, NamespaceSummary
    from kvstrata.operations.listing import Totals
    from kvstrata.operations.verification import Finding, Verification

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024


def print_inspection(console: Console, found: Inspection) -> None:
    """What is in a store."""
    _say(console, f"{found.address}: {found.medium}, {size(found.total_bytes)}")
    for namespace in found.namespaces:
        _say(console, _namespace_line(namespace))
        console.print(_group_table(namespace))
    keeping = found.housekeeping
    _say(console, f"being written: {_totals(keeping.temporary)}")
    _say(console, f"left by crashed writers: {_totals(keeping.leftovers)}")
    _say(console, f"in quarantine: {_totals(keeping.quarantined)}")
    if found.strays.num_files:
        _say(console, f"under names that are no chunk's: {_totals(found.strays)}")
    if keeping.usage is not None:
        usage = keeping.usage
        state = "right" if usage.drift_bytes == 0 else f"off by {usage.drift_bytes:+,} bytes"
        _say(console, f"usage counter: {usage.counted_bytes:,} bytes, {state}")


def print_verification(console: Console, found: Verification) -> None:
    """The bad chunks, one a line, and a sum."""
    for finding in found.findings:
        _say(console, _finding_line(finding))
    if not found.is_usage_right:
        _say(console, "the usage counter could not be corrected")
    state = f"{len(found.findings):,} not fine" if found.findings else "all fine"
    _say(console, f"{found.address}: {found.num_files:,} files, {size(found.num_bytes)}, {state}")


def print_collection(console: Console, done: Collection) -> None:
    """What was removed, and what is left."""
    _say(console, f"evicted: {_totals(done.evicted)}")
    _say(console, f"left by crashed writers, removed: {_totals(done.leftovers)}")
    if done.foreign_bytes:
        _say(console, f"of other users, not touched: {size(done.foreign_bytes)}")
    if not done.is_alone:
        _say(console, "another process keeps this store within its own limits meanwhile")
    if not done.is_usage_right:
        _say(console, "the usage counter could not be corrected")
    state = "within" if done.has_reached_quota else "still above"
    sizes = f"{size(done.after_bytes)} left of {size(done.before_bytes)}"
    _say(console, f"{done.address}: {sizes}, {state} {size(done.quota_bytes)}")


def size(num_bytes: int) -> str:
    """A number of bytes, rounded for people."""
    if num_bytes < _STEP:
        return f"{num_bytes} B"
    value, unit = float(num_bytes), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def _namespace_line(namespace: NamespaceSummary) -> str:
    ranks = ", ".join(f"{rank.index} of {rank.count}" for rank in namespace.ranks)
    chunks = f"{namespace.num_chunks:,} chunks, {namespace.num_complete:,} complete"
    used = f"used {_moment(namespace.oldest_use_ns)} to {_moment(namespace.newest_use_ns)}"
    lines = (
        f"\nnamespace {shown_name(namespace.fingerprint)}",
        f"  {chunks}, {_totals(namespace.files)}",
        f"  ranks {ranks}; {used}",
    )
    return "\n".join(lines)


def _group_table(namespace: NamespaceSummary) -> Table:
    table = Table("group", "kind", "block", "chunk", "files", "size")
    for group in namespace.groups:
        table.add_row(*map(Text, _group_cells(group)))
    return table


def _group_cells(group: GroupSummary) -> tuple[str, ...]:
    return (
        str(group.group_id),
        group.kind or "unknown",
        "" if group.block_tokens is None else f"{group.block_tokens:,} tokens",
        "" if group.chunk_tokens is None else f"{group.chunk_tokens:,} tokens",
        f"{group.files.num_files:,}",
        size(group.files.num_bytes),
    )


def _finding_line(finding: Finding) -> str:
    moved = f" -> {shown_name(finding.moved_to)}" if finding.moved_to else ""
    return f"{finding.verdict.value}: {shown_name(finding.place.name)}: {finding.reason}{moved}"


def _totals(totals: Totals) -> str:
    return f"{totals.num_files:,} files, {size(totals.num_bytes)}"


def _moment(time_ns: int | None) -> str:
    if time_ns is None:
        return "unknown"
    return datetime.fromtimestamp(time_ns / 10**9, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
