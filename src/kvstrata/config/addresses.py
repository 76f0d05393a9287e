"""Addresses as they may be shown: without what lets somebody in."""

from __future__ import annotations

import re
from typing import Final

# Greedy up to the last "@" before a query: passwords may hold slashes and at-signs themselves.
_USER: Final = re.compile(r"(?<=://)[^?#]*@")
_QUERY: Final = re.compile(r"(?<=\?)[^#'\"\s]+")


def shown(value: object) -> str:
    """A setting's value for people: free-form options by name alone, addresses without secrets."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: ***" for key in value) + "}"
    return without_credentials(str(value))


def without_credentials(text: str) -> str:
    """The text with user, password and query of an address replaced by stars."""
    if "://" not in text:
        return text
    return _QUERY.sub("***", _USER.sub("***@", text))
