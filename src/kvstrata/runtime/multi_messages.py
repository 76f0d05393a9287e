"""What the two halves of several connectors send each other."""

from __future__ import annotations

import msgspec


class MultiMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step's messages to a rank's children."""

    parts: dict[str, bytes] = {}
    """By the child's name; a child without one is left alone in this step."""
    stopping: list[str] = []
    """Children that must be stopped for good."""


class MultiReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank's children said after a step."""

    parts: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    """Children that raised since the last report, and what."""
    stopped: list[str] = []
    """Children that are stopped on this rank, since whenever."""
    unclean: list[str] = []
    """Those of them whose stop raised: they may still touch the caches."""
