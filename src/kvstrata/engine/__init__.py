"""A small, real inference engine for hybrid models, with the caches that offloading plugs into.

The names are looked up on first use: the scheduler, which needs no torch, can be had without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstrata.engine.engine import Answer, ConnectorParts, Engine, NewToken
    from kvstrata.engine.options import EngineOptions
    from kvstrata.engine.scheduling.request import FinishReason
    from kvstrata.engine.scheduling.step import SamplingParams

__all__ = [
    "Answer",
    "ConnectorParts",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "NewToken",
    "SamplingParams",
]

_MODULES: Final = {
    "EngineOptions": "kvstrata.engine.options",
    "FinishReason": "kvstrata.engine.scheduling.request",
    "SamplingParams": "kvstrata.engine.scheduling.step",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has this name
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "kvstrata.engine.engine")), name)
