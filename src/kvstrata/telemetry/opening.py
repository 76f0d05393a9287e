"""The publisher that a configuration asks for, if what it needs is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.config.schema import EventsConfig
    from kvstrata.telemetry.event_publisher import EventPublisher


def open_publisher(config: EventsConfig, data_parallel_rank: int = 0) -> EventPublisher | None:
    """Open a publisher; None: no endpoint is set.

    Raises:
        ConfigError: the endpoint cannot be used, or pyzmq is not installed.
    """
    if config.endpoint is None:
        return None
    try:
        from kvstrata.telemetry.event_publisher import EventPublisher  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(
            "events.endpoint",
            f"needs the package {error.name}",
            "an endpoint after: pip install 'kvstrata[events]'",
        ) from error
    return EventPublisher(config, data_parallel_rank)
