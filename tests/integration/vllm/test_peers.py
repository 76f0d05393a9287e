"""What else users can choose on a CPU: said exactly, so that it is noticed when it changes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ("OffloadingConnector", "only supported on CUDA-alike and XPU"),
        ("SimpleCPUOffloadConnector", "priority_range"),
    ],
)
def test_vllms_own_connectors_do_not_start(
    connector: str, message: str, checkpoints: Any, serve: Any
) -> None:
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 10**9},
    }

    with (
        pytest.raises(Exception, match=message),
        serve(checkpoints.of("lfm2"), None, kv_transfer_config=transfer),
    ):
        pass
