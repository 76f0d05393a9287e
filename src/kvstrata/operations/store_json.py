"""Results as JSON objects, for programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.operations.collection import Collection
    from kvstrata.operations.inspection import GroupSummary, Inspection, NamespaceSummary
    from kvstrata.operations.listing import Totals, UsageCount
    from kvstrata.operations.verification import Finding, Verification


def inspection_json(found: Inspection) -> dict[str, Any]:
    """What is in a store."""
    keeping = found.housekeeping
    return {
        "address": found.address,
        "medium": found.medium,
        "total_bytes": found.total_bytes,
        "namespaces": [_namespace(namespace) for namespace in found.namespaces],
        "strays": _totals(found.strays),
        "temporary": _totals(keeping.temporary),
        "leftovers": _totals(keeping.leftovers),
        "quarantined": _totals(keeping.quarantined),
        "usage": _usage(keeping.usage),
    }


def verification_json(found: Verification) -> dict[str, Any]:
    """How a store did."""
    return {
        "address": found.address,
        "clean": found.is_clean,
        "files": found.num_files,
        "bytes": found.num_bytes,
        "usage_right": found.is_usage_right,
        "findings": [_finding(finding) for finding in found.findings],
    }


def collection_json(done: Collection) -> dict[str, Any]:
    """What was removed, and what is left."""
    return {
        "address": done.address,
        "quota_reached": done.has_reached_quota,
        "quota_bytes": done.quota_bytes,
        "before_bytes": done.before_bytes,
        "after_bytes": done.after_bytes,
        "foreign_bytes": done.foreign_bytes,
        "evicted": _totals(done.evicted),
        "leftovers": _totals(done.leftovers),
        "alone": done.is_alone,
        "usage_right": done.is_usage_right,
    }


def _namespace(namespace: NamespaceSummary) -> dict[str, Any]:
    return {
        "fingerprint": namespace.fingerprint,
        "chunks": namespace.num_chunks,
        "complete_chunks": namespace.num_complete,
        **_totals(namespace.files),
        "ranks": [f"{rank.index}of{rank.count}" for rank in namespace.ranks],
        "groups": [_group(group) for group in namespace.groups],
        "oldest_use": _moment(namespace.oldest_use_ns),
        "newest_use": _moment(namespace.newest_use_ns),
    }


def _group(group: GroupSummary) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "kind": group.kind,
        "block_tokens": group.block_tokens,
        "chunk_tokens": group.chunk_tokens,
        **_totals(group.files),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.place.name,
        "verdict": finding.verdict.value,
        "reason": finding.reason,
        "moved_to": finding.moved_to,
    }


def _usage(usage: UsageCount | None) -> dict[str, int] | None:
    if usage is None:
        return None
    return {"counted_bytes": usage.counted_bytes, "found_bytes": usage.found_bytes}


def _totals(totals: Totals) -> dict[str, int]:
    return {"files": totals.num_files, "bytes": totals.num_bytes}


def _moment(time_ns: int | None) -> str | None:
    """ISO 8601, in UTC."""
    if time_ns is None:
        return None
    return datetime.fromtimestamp(time_ns / 10**9, tz=UTC).isoformat()
