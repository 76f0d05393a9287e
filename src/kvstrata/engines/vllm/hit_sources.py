"""Where loaded tokens came from, in vLLM's words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from kvstrata.config.schema import FilesystemTierConfig, tier_name
from kvstrata.telemetry.event_tracker import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata.config.schema import Config

_OTHER: Final = "external_unspecified"


class HitSources:
    """Translates the names of tiers.

    Args:
        config: the tiers.
    """

    def __init__(self, config: Config) -> None:
        disks = [tier for tier in config.tiers if isinstance(tier, FilesystemTierConfig)]
        self._words = {HOST: "host"} | {tier_name(tier): "disk" for tier in disks}

    def labelled(self, sources: Mapping[str, int], num_tokens: int) -> dict[Any, int]:
        """Tokens by vLLM's word for their source; what is not known is said so."""
        from vllm.v1.metrics.cache_hit_source import (  # noqa: PLC0415 - newer versions only
            CacheHitSource,
        )

        tokens: Counter[str] = Counter()
        for tier, count in sources.items():
            tokens[self._words.get(tier, _OTHER)] += count
        if tokens.total() != num_tokens:
            tokens = Counter({_OTHER: num_tokens})
        return {CacheHitSource(word): count for word, count in tokens.items() if count}
