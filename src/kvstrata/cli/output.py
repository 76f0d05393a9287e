"""Consoles: results to standard output, messages to standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console


def results() -> Console:
    """Where results go."""
    return Console(highlight=False)


def errors() -> Console:
    """Where messages go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(data: dict[str, Any]) -> None:
    """Print one object, and nothing else, for programs."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
