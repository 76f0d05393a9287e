"""A tier's kind to the class that does it, imported when first used.

A tier written elsewhere is named by its import path, as in
`{kind: custom, store: "package.module:Class"}`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvstrata.config.schema import CustomTierConfig
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata.config.schema import TierConfig
    from kvstrata.core.chunk_label import Namespace, Rank
    from kvstrata.interfaces import ChunkStore


class _Entry(NamedTuple):
    """Where a kind is, and how to install what it needs."""

    path: str
    extra: str | None = None


_KINDS: Final = {
    "filesystem": _Entry("kvstrata.tiers.filesystem:FilesystemStore"),
    "object_store": _Entry("kvstrata.tiers.object_store:BucketStore", "s3"),
    "valkey": _Entry("kvstrata.tiers.valkey:ValkeyStore", "valkey"),
}


def open_store(config: TierConfig, namespace: Namespace, rank: Rank) -> ChunkStore:
    """Open one rank's store of a tier.

    Raises:
        ConfigError: the tier cannot be opened, or what it needs is not installed.
    """
    if isinstance(config, CustomTierConfig):
        make = _load(_Entry(config.store), "store")
    else:
        make = _load(_KINDS[str(config.__struct_config__.tag)], "kind")
    return make(config, namespace, rank)


def _load(entry: _Entry, setting: str) -> Callable[[TierConfig, Namespace, Rank], ChunkStore]:
    module, _, name = entry.path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        accepted = "the import path of an installed class, as in package.module:Class"
        if entry.extra:
            accepted = f"this kind after: pip install 'kvstrata[{entry.extra}]'"
        raise ConfigError(setting, f"{entry.path} cannot be imported: {error}", accepted) from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            setting, f"{entry.path} names no class: {error}", "as in package.module:Class"
        ) from error
    return cast("Callable[[TierConfig, Namespace, Rank], ChunkStore]", found)
