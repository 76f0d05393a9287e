"""KV-cache offloading for hybrid LLMs: correct, in time, or not at all.

Importing this package loads the planning core alone: the standard library, no torch, no engine.
"""

from __future__ import annotations

from kvstrata.core.cache_reduction import reduce_kv_caches
from kvstrata.core.canonical import CanonicalKVCaches
from kvstrata.core.chunk_grid import ChunkGeometry, ChunkGrid
from kvstrata.core.hashing import AdoptedHashes, ExtraKeys, MediaSpan, PrefixHasher
from kvstrata.core.layout import GroupKind, KVGroup, KVLayer, KVLayout, ParallelLayout, Sharding
from kvstrata.core.lookups import ChunkLookup, all_ready
from kvstrata.errors import (
    ChunkCorrupt,
    ClosedError,
    ConfigError,
    EngineError,
    KVStrataError,
    LayoutError,
    ModelError,
    RequestError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
    TransferError,
    UnsupportedEngineError,
)
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.load_plan import LoadBounds, LoadPlan, choose_load, usable_lengths
from kvstrata.planning.reach import require_reach
from kvstrata.planning.request_ledger import RequestLedger, StateOffer
from kvstrata.planning.store_plan import StorePlan, choose_stores

__version__ = "0.1.0"

__all__ = [
    "AdoptedHashes",
    "CanonicalKVCaches",
    "ChunkCorrupt",
    "ChunkGeometry",
    "ChunkGrid",
    "ChunkLookup",
    "ClosedError",
    "ConfigError",
    "EngineError",
    "ExtraKeys",
    "GroupKind",
    "KVGroup",
    "KVLayer",
    "KVLayout",
    "KVStrataError",
    "LayoutError",
    "LoadBounds",
    "LoadPlan",
    "MediaSpan",
    "ModelError",
    "ParallelLayout",
    "PrefixHasher",
    "RequestError",
    "RequestLedger",
    "Sharding",
    "StateOffer",
    "StorePlan",
    "TierError",
    "TierFull",
    "TierTimeout",
    "TierUnavailable",
    "TransferError",
    "UnsupportedEngineError",
    "all_ready",
    "choose_load",
    "choose_stores",
    "cut_into_chunks",
    "reduce_kv_caches",
    "require_reach",
    "usable_lengths",
]
