"""Eviction policies by the names they have in the configuration."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvstrata.errors import ConfigError
from kvstrata.policies.arc import ArcPolicy
from kvstrata.policies.lru import LruPolicy
from kvstrata.policies.s3_fifo import S3FifoPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstrata.config.schema import EvictionName
    from kvstrata.interfaces import EvictionPolicy

POLICIES: Final[Mapping[EvictionName, Callable[[int], EvictionPolicy]]] = MappingProxyType(
    {"lru": LruPolicy, "s3fifo": S3FifoPolicy, "arc": ArcPolicy}
)
"""What makes each policy, from the tier's capacity in bytes."""


def make_policy(name: EvictionName, capacity_bytes: int) -> EvictionPolicy:
    """A policy that follows nothing yet.

    Raises:
        ConfigError: no policy has this name.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError("host.eviction", f"no policy is called {name!r}", " or ".join(POLICIES))
    return make(capacity_bytes)
