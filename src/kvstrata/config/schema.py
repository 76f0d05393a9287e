"""Every setting, its default and its meaning, each written once.

The descriptions below are what `kvstrata config explain` and `kvstrata config schema` print.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvstrata.config.addresses import shown
from kvstrata.config.units import ByteSize, Duration, duration, size

EvictionName: TypeAlias = Literal["lru", "s3fifo", "arc"]
Durability: TypeAlias = Literal["none", "data", "full"]
Weight: TypeAlias = Annotated[
    float, Meta(gt=0, description="Preference over other tiers when several hold a chunk.")
]
TierName: TypeAlias = Annotated[
    str | None, Meta(description="Name in metrics, events and logs; null: the kind.")
]
Endpoint: TypeAlias = Annotated[str, Meta(pattern=r"^(tcp|ipc)://.+")]
Required: TypeAlias = Annotated[
    bool, Meta(description="Whether a tier that cannot be opened stops the start.")
]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shared behaviour of all sections: immutable, no unknown keys, no credentials in `repr`."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(f'{n}={shown(v)}' for n, v in values)})"


class HostConfig(_Section, frozen=True, kw_only=True):
    """Host memory: where every chunk passes through."""

    capacity: Annotated[ByteSize, Meta(description="Size of each rank's arena.")] = size("4GiB")
    eviction: Annotated[
        EvictionName, Meta(description="Which chunks leave first when the arena is full.")
    ] = "arc"


class FilesystemTierConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="filesystem"):
    """A directory, local or shared."""

    path: Annotated[str, Meta(min_length=1, description="The directory; made if missing.")]
    quota: Annotated[
        ByteSize | None, Meta(description="Most bytes over all namespaces; null: no limit.")
    ] = None
    min_free: Annotated[ByteSize, Meta(description="Room always left free on the file system.")] = (
        size("1GiB")
    )
    durability: Annotated[
        Durability,
        Meta(description="What is synced before a chunk counts as written: none, data, or full."),
    ] = "data"
    daily_writes: Annotated[
        ByteSize | None, Meta(description="Most bytes written a day, for SSD life; null: no limit.")
    ] = None
    weight: Weight = 1.0
    name: TierName = None
    required: Required = True


class ObjectStoreTierConfig(
    _Section, frozen=True, kw_only=True, tag_field="kind", tag="object_store"
):
    """A bucket that speaks S3, or another store that obstore knows."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9+]+://.+", description="Bucket and prefix, as in s3://bucket/cache."
        ),
    ]
    endpoint: Annotated[
        str | None, Meta(description="Address of an S3-compatible server; null: the provider's.")
    ] = None
    region: Annotated[str | None, Meta(description="Region; null: from the environment.")] = None
    timeout: Annotated[Duration, Meta(description="Longest wait for one request.")] = duration(
        "10s"
    )
    concurrency: Annotated[
        int, Meta(ge=1, le=1024, description="Requests under way at once, per rank.")
    ] = 16
    weight: Weight = 1.0
    name: TierName = None
    required: Required = True


class ValkeyTierConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="valkey"):
    """A Valkey or Redis server, or a cluster of them."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^(valkey|redis)s?://.+",
            description="Address, as in valkey://cache:6379/0; credentials are never logged.",
        ),
    ]
    cluster: Annotated[bool, Meta(description="Whether the address is a cluster's.")] = False
    ttl: Annotated[
        Duration | None, Meta(description="Life of a chunk; null: the server's maxmemory decides.")
    ] = None
    timeout: Annotated[Duration, Meta(description="Longest wait for one request.")] = duration("2s")
    weight: Weight = 1.0
    name: TierName = None
    required: Required = True


class CustomTierConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="custom"):
    """A tier written elsewhere."""

    store: Annotated[
        str,
        Meta(
            pattern=r"^[\w.]+:\w+$",
            description="Its class, as in package.module:Class.",
        ),
    ]
    options: Annotated[
        dict[str, Any], Meta(description="Settings of its own, which it checks itself.")
    ] = msgspec.field(default_factory=dict)
    weight: Weight = 1.0
    name: TierName = None
    required: Required = True


TierConfig: TypeAlias = (
    FilesystemTierConfig | ObjectStoreTierConfig | ValkeyTierConfig | CustomTierConfig
)


def tier_name(tier: TierConfig) -> str:
    """A tier's name: its own, or its kind."""
    return tier.name or str(tier.__struct_config__.tag)


class StoreConfig(_Section, frozen=True, kw_only=True):
    """What is stored, and when."""

    mode: Annotated[
        Literal["eager", "lazy", "off"],
        Meta(description="eager: when computed; lazy: just before eviction; off: never."),
    ] = "eager"
    decode: Annotated[
        bool, Meta(description="Whether generated tokens are stored, not the prompt alone.")
    ] = True


class LoadConfig(_Section, frozen=True, kw_only=True):
    """How a hit is awaited and weighed."""

    deadline: Annotated[
        Duration,
        Meta(description="Longest wait of one request before it goes on with what is there."),
    ] = duration("10s")
    decide: Annotated[
        Literal["cost", "always"],
        Meta(description="cost: load only what beats recomputing; always: load every hit."),
    ] = "cost"


class EventsConfig(_Section, frozen=True, kw_only=True):
    """KV events for routers."""

    self_describing: Annotated[
        bool, Meta(description="Whether events carry tokens, parents, groups and tiers.")
    ] = False
    endpoint: Annotated[
        Endpoint | None,
        Meta(
            description="Where kvstrata publishes them itself, as in tcp://*:5557; "
            "null: the engine does."
        ),
    ] = None
    replay_endpoint: Annotated[
        Endpoint | None,
        Meta(description="Where readers ask for batches they missed; null: they cannot."),
    ] = None
    topic: Annotated[str, Meta(description="The topic that readers subscribe to.")] = ""
    queue_batches: Annotated[
        int, Meta(ge=1, description="Most batches that wait to be sent; then new ones are dropped.")
    ] = 10_000
    replay_batches: Annotated[
        int, Meta(ge=1, description="Past batches kept for readers that missed some.")
    ] = 10_000


class Config(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    host: HostConfig = msgspec.field(default_factory=HostConfig)
    tiers: Annotated[
        tuple[TierConfig, ...], Meta(description="Tiers below host memory, fastest first.")
    ] = ()
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)
    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    events: EventsConfig = msgspec.field(default_factory=EventsConfig)
    hybrid_chunk_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most tokens in a chunk; null: chosen from the model's groups."),
    ] = None
