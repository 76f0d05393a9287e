"""The embedded engine with kvstrata's own connector."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from kvstrata.engine.checkpoint import read_config
from kvstrata.engine.engine import ConnectorParts
from kvstrata.runtime.assemble import ModelIdentity, make_scheduler_side, make_worker_side
from kvstrata.runtime.weights import weights_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata.config.schema import Config

_HASHING: Final = "sha256/kvstrata/prefix/1"


def offloading(config: Config, model_dir: Path, device: str = "cpu") -> ConnectorParts:
    """The connector for a model, to be handed to `Engine`.

    Args:
        config: tiers and rules.
        model_dir: the model; its weights become part of every chunk's name.
        device: where the engine computes; other kernels make other bytes.

    Raises:
        ModelError: the directory cannot be used.
    """
    longest = int(read_config(model_dir).get("max_position_embeddings", 4096))
    kernels = f"/embedded/{device.partition(':')[0]}"
    identity = ModelIdentity(weights_digest(model_dir), _HASHING, kernels)
    return ConnectorParts(
        functools.partial(make_scheduler_side, config, max_request_tokens=longest),
        functools.partial(make_worker_side, config, identity),
    )
