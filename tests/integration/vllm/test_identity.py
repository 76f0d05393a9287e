"""Real vLLM: engines share chunks only if all that bytes depend on is equal."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
    }
}


def identity_of(model: Path, **options: Any) -> Any:
    """As an engine with these options would have it."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - slow to import

    from kvstrata.engines.vllm.identity import read_identity  # noqa: PLC0415 - needs vLLM

    transfer = {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": {"capacity": "64MiB"}},
    }
    common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024}
    args = EngineArgs(model=str(model), kv_transfer_config=transfer, **common | options)
    config: Any = SimpleNamespace(kv_cache_groups=[], kv_cache_layout=None)
    return read_identity(args.create_engine_config(), config)


@pytest.fixture(scope="module")
def model(checkpoints: Any) -> Path:
    folder: Path = checkpoints.of("llama")
    return folder


def test_a_copy_of_a_model_is_the_same_and_its_longest_request_does_not_matter(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "copy")

    assert identity_of(tmp_path / "copy", max_model_len=2048) == identity_of(model)


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rms_norm_eps": 0.5}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}},
        {"dtype": "float32"},
        {"block_size": 64, "prefix_caching_hash_algo": "sha256_cbor"},
    ],
    ids=["a number", "rope", "dtype", "hashes"],
)
def test_what_numbers_depend_on_makes_another(model: Path, options: dict[str, Any]) -> None:
    assert identity_of(model, **options) != identity_of(model)
    assert identity_of(model, **options) == identity_of(model, **options)


def test_with_two_sets_of_factors_the_longest_request_chooses(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "longrope"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | LONGROPE))

    assert identity_of(folder, max_model_len=2048) != identity_of(folder, max_model_len=512)


def test_overrides_by_a_function_are_an_engines_own(model: Path) -> None:
    def as_it_is(config: Any) -> Any:
        return config

    one, two = (identity_of(model, hf_overrides=as_it_is) for _ in range(2))
    assert one != two
