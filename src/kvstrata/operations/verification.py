"""Read every chunk of a store completely and name the bad ones.

Ownership: workers share one iterator of places and one list of findings, both under `_lock`.
"""

from __future__ import annotations

import enum
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvstrata.operations.checking import check_chunk
from kvstrata.operations.listing import no_progress, shown_name
from kvstrata.tiers.chunk_format import BadChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.operations.listing import OnProgress, Place, StoreListing

NUM_WORKERS: Final = 8


class Verdict(enum.Enum):
    """What was found out about a chunk that is not fine."""

    BAD = "bad"
    """Its bytes are not the chunk that its place promises."""
    UNREADABLE = "unreadable"
    """It could not be read now; nothing is known about its bytes, so nothing is moved."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One chunk that is not fine."""

    place: Place
    verdict: Verdict
    reason: str
    moved_to: str | None = None
    """Where it is now; None: where it was."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How a whole store did."""

    address: str
    num_files: int
    num_bytes: int
    findings: tuple[Finding, ...]
    is_usage_right: bool = True
    """False: the shared counter was to be corrected and could not be."""

    @property
    def is_clean(self) -> bool:
        """Whether everything is as it was written."""
        return not self.findings and self.is_usage_right


def verify(listing: StoreListing, on_progress: OnProgress = no_progress) -> Verification:
    """Check every chunk. Changes nothing, last uses included.

    Raises:
        TierUnavailable: the store cannot be listed.
    """
    places = list(listing.places())
    round_ = _Round(listing, places, on_progress)
    return Verification(
        address=listing.address,
        num_files=len(places),
        num_bytes=sum(place.num_bytes for place in places),
        findings=tuple(sorted(round_.run(), key=lambda finding: finding.place.name)),
    )


def fix(listing: StoreListing, found: Verification) -> Verification:
    """Move bad chunks out of the way and put the shared counter right.

    Each is checked once more first, since a writer may have replaced it meanwhile.

    Raises:
        TierUnavailable: the store cannot be listed.
    """
    findings = tuple(_fixed(listing, finding) for finding in found.findings)
    return replace(found, findings=findings, is_usage_right=listing.correct_usage())


def judge(listing: StoreListing, place: Place) -> Finding | None:
    """Check one chunk; None: it is fine, or went away meanwhile."""
    try:
        check_chunk(listing, place)
    except FileNotFoundError:
        return None
    except BadChunk as error:
        return Finding(place, Verdict.BAD, shown_name(str(error)))
    except OSError as error:
        return Finding(place, Verdict.UNREADABLE, shown_name(f"cannot be read: {_said(error)}"))
    return None


def _fixed(listing: StoreListing, finding: Finding) -> Finding:
    if finding.verdict is not Verdict.BAD or judge(listing, finding.place) is None:
        return finding
    try:
        return replace(finding, moved_to=listing.quarantine(finding.place))
    except FileNotFoundError:
        return finding
    except OSError as error:
        return replace(finding, reason=f"{finding.reason}; cannot be moved: {_said(error)}")


def _said(error: OSError) -> str:
    return error.strerror or str(error)


class _Round:
    """Workers that take places in turns until none is left."""

    def __init__(
        self, listing: StoreListing, places: Sequence[Place], on_progress: OnProgress
    ) -> None:
        self._listing = listing
        self._places = iter(places)
        self._total_bytes = sum(place.num_bytes for place in places)
        self._done_bytes = 0
        self._findings: list[Finding] = []
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def run(self) -> list[Finding]:
        with ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="kvstrata-verify") as pool:
            workers = [pool.submit(self._work) for _ in range(NUM_WORKERS)]
            try:
                for worker in workers:
                    worker.result()
            finally:
                self._stop()  # after Ctrl-C the pool waits for its workers
        return self._findings

    def _work(self) -> None:
        while (place := self._take()) is not None:
            self._settle(place, judge(self._listing, place))

    def _take(self) -> Place | None:
        with self._lock:
            return next(self._places, None)

    def _settle(self, place: Place, finding: Finding | None) -> None:
        with self._lock:
            if finding is not None:
                self._findings.append(finding)
            self._done_bytes += place.num_bytes
            self._on_progress(self._done_bytes, self._total_bytes)

    def _stop(self) -> None:
        with self._lock:
            self._places = iter(())
