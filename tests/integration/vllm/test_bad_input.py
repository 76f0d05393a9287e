"""Real vLLM: what cannot work stops the start with one clear message, or is left out and said."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]

HOST = {"host": {"capacity": "64MiB"}, "load": {"decide": "always"}}


def transfer(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
        **changes,
    }


@pytest.mark.parametrize(
    ("settings", "changes", "options", "message"),
    [
        (HOST | {"hots": {}}, {}, {}, r"hots.*host"),
        (HOST | {"store": {"mode": "later"}}, {}, {}, r"store\.mode.*eager"),
        (HOST, {"kv_role": "kv_producer"}, {}, r"kv_role.*kv_both"),
        (HOST, {}, {"enable_prefix_caching": False}, r"enable_prefix_caching.*true"),
        ({"config": "/nowhere/kvstrata.yaml"}, {}, {}, r"/nowhere/kvstrata\.yaml"),
        (HOST | {"config": "kvstrata.yaml"}, {}, {}, r"config.*alone"),
        ({"host": {"capacity": "900TiB"}}, {}, {}, r"host\.capacity.*less"),
    ],
)
def test_a_start_that_cannot_work_is_refused(
    settings: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
    message: str,
    checkpoints: Any,
    serve: Any,
) -> None:
    options = {"enable_prefix_caching": True} | options
    options["kv_transfer_config"] = transfer(settings, **changes)

    with pytest.raises(Exception, match=message), serve(checkpoints.of("llama"), None, **options):
        pass


def test_a_tier_that_cannot_be_opened_stops_the_start(
    checkpoints: Any, serve: Any, tmp_path: Path
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("no directory")
    tier = {"kind": "filesystem", "path": str(blocked)}

    with (
        pytest.raises(Exception, match=r"filesystem.*required: false"),
        serve(checkpoints.of("llama"), HOST | {"tiers": [tier]}),
    ):
        pass


def test_a_tier_that_is_not_required_is_left_out(
    checkpoints: Any,
    serve: Any,
    prompt_of: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("no directory")
    tier = {"kind": "filesystem", "path": str(blocked), "required": False}
    prompt = prompt_of(600)

    with (
        caplog.at_level(logging.WARNING),
        serve(checkpoints.of("llama"), HOST | {"tiers": [tier]}) as served,
    ):
        [cold] = served.ask(prompt)
        served.drop_device_cache()
        [restored] = served.ask(prompt)

    assert restored.cached_tokens == 512
    assert restored.tokens == cold.tokens
    assert any("filesystem is left out" in record.getMessage() for record in caplog.records)


def test_a_failure_policy_that_fails_requests_is_pointed_out(
    checkpoints: Any, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = transfer(HOST, kv_load_failure_policy="fail")

    with (
        caplog.at_level(logging.WARNING),
        serve(checkpoints.of("llama"), None, kv_transfer_config=config),
    ):
        pass

    assert any("kv_load_failure_policy" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_parallelism_that_is_not_known_is_refused(name: str) -> None:
    from types import SimpleNamespace  # noqa: PLC0415

    from kvstrata.engines.vllm.settings import read_settings  # noqa: PLC0415
    from kvstrata.errors import ConfigError  # noqa: PLC0415

    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_connector_extra_config={}),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(**{name: 2}),
    )

    with pytest.raises(ConfigError, match=name):
        read_settings(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base, patch: patch.delattr(base, "KVConnectorTransferResults"), "has no KVC"),
        (lambda base, patch: patch.delattr(base.KVConnectorBase_V1, "take_events"), "take_events"),
        (
            lambda base, patch: patch.setattr(
                base.KVConnectorBase_V1, "__abstractmethods__", frozenset({"teleport"})
            ),
            "demands teleport",
        ),
    ],
)
def test_a_vllm_that_is_not_known_is_refused(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415

    from kvstrata.engines.vllm.features import check_features  # noqa: PLC0415
    from kvstrata.errors import UnsupportedEngineError  # noqa: PLC0415

    check_features()
    change(base, monkeypatch)

    with pytest.raises(UnsupportedEngineError, match=message):
        check_features()
