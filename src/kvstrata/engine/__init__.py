"""A small, real inference engine for hybrid models, with the caches that offloading plugs into."""

from kvstrata.engine.engine import Answer, ConnectorParts, Engine, EngineOptions, NewToken
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
