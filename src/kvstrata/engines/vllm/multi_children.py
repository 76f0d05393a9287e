"""From a multi connector's settings to its children: vLLM connectors of any origin."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from kvstrata.engines.several.settings import ChildSettings, read_children
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstrata.engines.vllm.multi_groups import GroupFacts


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child that is not made yet."""

    settings: ChildSettings
    connector_class: type[Any]
    transfer: KVTransferConfig

    @property
    def name(self) -> str:
        """The child's unique name."""
        return self.settings.name

    @property
    def class_path(self) -> str:
        """Where any process finds its class, as `module:Class`."""
        module = self.transfer.kv_connector_module_path or self.connector_class.__module__
        return f"{module}:{self.connector_class.__name__}"

    @property
    def keeps_hybrid_groups(self) -> bool:
        """Whether its class, or for a wrapper what it wraps, keeps groups of any kind."""
        by_config = getattr(KVConnectorFactory, "supports_hma_config", None)
        return bool(by_config(self.transfer) if by_config else supports_hma(self.connector_class))

    def config(self, vllm_config: VllmConfig) -> VllmConfig:
        """The configuration as the child sees it."""
        own = copy.copy(vllm_config)
        own.kv_transfer_config = self.transfer
        return own


def read_specs(transfer: KVTransferConfig) -> list[ChildSpec]:
    """The children of a multi connector.

    Raises:
        ConfigError: a setting is wrong, or a class cannot be found.
    """
    inherited = {
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
    }
    specs = read_class_specs(transfer.kv_connector_extra_config, inherited)
    for place, spec in enumerate(specs):
        if "engine_id" not in spec.settings.transfer:  # children may name shared memory by it
            spec.transfer.engine_id = f"{transfer.engine_id}-{place}"
    return specs


def read_class_specs(extra: Mapping[str, Any], inherited: Mapping[str, Any]) -> list[ChildSpec]:
    """The children, for questions to their classes alone.

    Raises:
        ConfigError: a setting is wrong, or a class cannot be found.
    """
    keys = [field.name for field in fields(KVTransferConfig)]
    return [_spec(settings, inherited) for settings in read_children(extra, keys)]


def check_groups(specs: Sequence[ChildSpec], groups: GroupFacts) -> None:
    """Refuse children that cannot keep the model's groups.

    Raises:
        ConfigError: names them.
    """
    unable = [spec.name for spec in specs if not spec.keeps_hybrid_groups]
    if unable and not groups.is_plain:
        raise ConfigError(
            "connectors",
            f"{', '.join(unable)} cannot keep hybrid groups, but the model's groups are "
            f"{', '.join(groups.kinds)}",
            "connectors that support the hybrid memory allocator (SupportsHMA)",
        )


def make_children(
    specs: Sequence[ChildSpec],
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
) -> list[Any]:
    """Make every child, or none: those that were made are shut down if one cannot be."""
    made: list[Any] = []
    try:
        for spec in specs:
            with naming(spec.name):
                config = spec.config(vllm_config)
                made.append(spec.connector_class(config, role, kv_cache_config))
    except BaseException:
        for connector in made:
            connector.shutdown()
        raise
    return made


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add a child's name to what it raises while vLLM starts."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in connector {name!r} of KVStrataMultiConnector")
        raise


def _spec(settings: ChildSettings, inherited: Mapping[str, Any]) -> ChildSpec:
    if settings.transfer["kv_connector"] == "KVStrataMultiConnector":
        raise ConfigError(
            f"{settings.path}.kv_connector", "it is made of several itself", "a single connector"
        )
    try:
        transfer = KVTransferConfig(**{**inherited, **settings.transfer})
    except ValueError as error:
        raise ConfigError(settings.path, str(error), "settings of a KV connector") from error
    try:
        found = KVConnectorFactory.get_connector_class(transfer)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{settings.path}.kv_connector",
            str(error),
            "a connector of vLLM, or a class in kv_connector_module_path",
        ) from error
    return ChildSpec(settings, found, transfer)
