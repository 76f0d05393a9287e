"""From the configuration to the two halves: the only place that wires concrete classes."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.config.schema import tier_name
from kvstrata.core.chunk_label import Namespace, Rank
from kvstrata.errors import ConfigError
from kvstrata.hierarchy.breaker import Breaker
from kvstrata.hierarchy.known_chunks import KnownChunks
from kvstrata.hierarchy.lower_tier import LowerTier
from kvstrata.hierarchy.opening import open_io
from kvstrata.hierarchy.ranks import RankedTier
from kvstrata.hierarchy.tier_stack import TierStack
from kvstrata.planning.chunk_sizes import cut_into_chunks
from kvstrata.planning.reach import require_reach
from kvstrata.policies.registry import make_policy
from kvstrata.runtime.message_channel import MessageChannel, Outbox
from kvstrata.runtime.scheduler_side import Announcing, SchedulerSide, Wiring
from kvstrata.runtime.worker_side import RankMemory, WorkerSide
from kvstrata.telemetry.event_tracker import make_tracker
from kvstrata.telemetry.opening import open_publisher
from kvstrata.tiers.host_arena import HostArena
from kvstrata.tiers.host_memory import HostMemoryIndex
from kvstrata.tiers.registry import open_store
from kvstrata.tiers.unavailable import UnavailableStore
from kvstrata.transfers.cache_views import CacheViews
from kvstrata.transfers.copiers import make_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata.config.schema import Config, TierConfig
    from kvstrata.core.layout import KVLayout
    from kvstrata.interfaces import ChunkStore
    from kvstrata.transfers.cache_views import LayerCache

_log = logging.getLogger(__name__)

_OPTIONAL: Final = "`required: false` to start without it"
_OPENED: Final = f"one that can be opened, or {_OPTIONAL}"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a chunk's bytes depend on besides tokens and geometry."""

    weights: str
    """A digest of the actual weights."""
    hashing: str
    """Algorithm and seed of the block hashes."""
    kernels: str = ""
    """What the engine's kernels add to the encoding of pages."""


def make_scheduler_side(
    config: Config,
    layout: KVLayout,
    *,
    max_request_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> SchedulerSide:
    """Make the scheduler half.

    Raises:
        ConfigError: the settings contradict each other, or can never lead to a hit.
    """
    geometry = cut_into_chunks(layout, config.hybrid_chunk_size)
    require_reach(geometry, max_request_tokens)
    num_ranks = layout.parallel.num_ranks
    outbox = Outbox(clock)
    channels = tuple(
        tuple(MessageChannel(outbox, tier, rank) for rank in range(num_ranks))
        for tier in range(len(config.tiers))
    )
    tiers = [
        LowerTier(
            tier_name(tier), RankedTier(to_ranks), Breaker(clock), KnownChunks(clock), tier.weight
        )
        for tier, to_ranks in zip(config.tiers, channels, strict=True)
    ]
    policy = make_policy(config.host.eviction, config.host.capacity)
    host = HostMemoryIndex(config.host.capacity, policy)
    stack = TierStack(host, tiers, clock)
    wiring = Wiring(stack, outbox, channels, num_ranks)
    announcing = Announcing(make_tracker(config), open_publisher(config.events))
    return SchedulerSide(config, geometry, wiring, announcing, clock)


def make_worker_side(config: Config, identity: ModelIdentity, rank: int) -> WorkerSide:
    """Make one rank's half; what depends on the caches is opened when they are known."""
    return WorkerSide(rank, functools.partial(_open_memory, config, identity, rank))


def _open_memory(
    config: Config,
    identity: ModelIdentity,
    rank: int,
    layout: KVLayout,
    caches: Mapping[str, LayerCache],
    num_blocks: int,
) -> RankMemory:
    views = CacheViews(layout, caches, num_blocks)
    namespace = Namespace(
        weights=identity.weights,
        geometry=cut_into_chunks(layout, config.hybrid_chunk_size).fingerprint,
        page_encoding=f"{views.canonical.page_encoding}{identity.kernels}",
        hashing=identity.hashing,
    )
    place = Rank(rank, layout.parallel.num_ranks)
    with contextlib.ExitStack() as opened:  # closes what was opened before a failure
        tiers = []
        for tier in config.tiers:
            tiers.append(open_io(tier, _open_store(tier, namespace, place)))
            opened.callback(tiers[-1].close)
        arena = HostArena(config.host.capacity)
        arena.pin()
        copies = make_queue(views, arena)
        opened.pop_all()
    return RankMemory(arena, copies, tiers)


def _open_store(config: TierConfig, namespace: Namespace, rank: Rank) -> ChunkStore:
    """Open a tier's store, or what stands in for it if the tier is not required."""
    name = tier_name(config)
    try:
        return open_store(config, namespace, rank)
    except Exception as error:  # a store written elsewhere may raise anything
        if config.required:
            if isinstance(error, ConfigError):
                accepted = f"{error.accepted}, or {_OPTIONAL}"
                raise ConfigError(f"tier {name}, {error.path}", error.problem, accepted) from error
            raise ConfigError(f"tier {name}", f"it cannot be opened: {error}", _OPENED) from error
        _log.warning("tier %s is left out: %s", name, error)
        return UnavailableStore(name, str(error))
