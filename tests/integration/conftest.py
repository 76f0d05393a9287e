"""What tests of whole engines share, ours and others'."""

from __future__ import annotations

import pytest

from kvstrata.transfers import copiers


@pytest.fixture
def plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that run in Python, so that `PlainCopier` can be held up or broken."""
    monkeypatch.setattr(copiers, "native_rows", lambda: None)
