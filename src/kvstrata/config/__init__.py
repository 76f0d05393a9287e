"""The configuration: one schema, parsed once at the edge."""

from __future__ import annotations

from kvstrata.config.parsing import parse_config, read_config
from kvstrata.config.schema import Config

__all__ = ["Config", "parse_config", "read_config"]
