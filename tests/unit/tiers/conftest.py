from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.tiers import file_io, python_file_io

if TYPE_CHECKING:
    from kvstrata.tiers.file_io import FileCalls


@pytest.fixture(params=["native", "python"])
def file_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileCalls:
    """Either implementation, in use everywhere during the test."""
    calls: FileCalls = python_file_io
    if request.param == "native":
        if not file_io.HAS_NATIVE:
            pytest.skip("the native file calls were not built")
        calls = file_io.calls
    monkeypatch.setattr(file_io, "calls", calls)
    return calls
