"""What the two halves of several vLLM connectors send each other. Picklable, by child's name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstrata.engines.several.loads import Orders

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class MultiMetadata(KVConnectorMetadata):
    """A step's messages to a rank's children."""

    parts: dict[str, KVConnectorMetadata]
    """A child without one is left alone in this step."""
    orders: Orders = field(default_factory=Orders)
    savers: dict[str, list[str]] = field(default_factory=dict)
    """Children that save requests which have ended, by request."""
    stopped: tuple[str, ...] = ()
    """Children that get nothing to do any more."""


@dataclass
class MultiReport(KVConnectorWorkerMetadata):
    """What the children of some ranks said after a step."""

    parts: dict[str, KVConnectorWorkerMetadata] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    """vLLM's containers of KV events."""
    faults: dict[str, str] = field(default_factory=dict)
    """Children that raised since the last report, and what."""
    unclean: frozenset[str] = frozenset()
    """Children that were closed, but may still touch the caches of a rank."""
    strays: Counter[str] = field(default_factory=Counter)
    """Requests that children reported though nobody had asked them to."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.parts or self.events or self.faults or self.unclean or self.strays)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiReport:
        """Both."""
        assert isinstance(other, MultiReport)
        return MultiReport(
            _joined(self.parts, other.parts, lambda a, b: a.aggregate(b)),
            _joined(self.events, other.events, _joined_events),
            {**other.faults, **self.faults},
            self.unclean | other.unclean,
            self.strays + other.strays,
        )


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """What a rank's children want to be known by others."""

    parts: dict[str, KVConnectorHandshakeMetadata]

    @staticmethod
    def of_child(name: str, by_rank: Mapping[Any, MultiHandshake]) -> dict[Any, Any]:
        """One child's metadata of all ranks that have it."""
        return {rank: said.parts[name] for rank, said in by_rank.items() if name in said.parts}


def _joined(first: dict[str, Any], second: dict[str, Any], join: Any) -> dict[str, Any]:  # noqa: ANN401
    """Two mappings as one; what stands in both is joined."""
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        joined[name] = join(first[name], second[name])
    return joined


def _joined_events(first: Any, second: Any) -> Any:  # noqa: ANN401 - vLLM's containers
    """The events of more workers in one container, as vLLM itself does it."""
    first.add_events(second.get_all_events())
    first.increment_workers(second.get_number_of_workers())
    return first
