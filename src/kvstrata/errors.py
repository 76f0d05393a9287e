"""Every exception kvstrata raises.

KVStrataError
├── ConfigError          a setting is wrong; carries its path and what is accepted
├── LayoutError          cache geometry that makes no sense or cannot be read with certainty
├── TierError            a fault in a tier; carries the tier's name and the keys concerned
│   ├── TierUnavailable  worth trying again later
│   ├── TierTimeout      the deadline passed
│   ├── TierFull         no room could be freed
│   └── ChunkCorrupt     size, checksum or fingerprint differ from what was written
├── TransferError        a copy between device and host failed
├── ModelError           a model directory cannot be used: names the file, key or tensor
├── RequestError         the embedded engine cannot serve a request: says what to change
├── EngineError          the embedded engine lost a rank
├── UnsupportedEngineError  an engine is too old or too new for its connector: says what to do
└── ClosedError          used after close()

A miss is a value, never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class KVStrataError(Exception):
    """The root of all errors raised by kvstrata."""


class ConfigError(KVStrataError, ValueError):
    """A setting is wrong.

    Args:
        path: where the setting stands, as in `tiers[0].quota`.
        problem: what is wrong with it, the value included.
        accepted: what would be right.
    """

    def __init__(self, path: str, problem: str, accepted: str) -> None:
        super().__init__(f"{path}: {problem}; accepted: {accepted}")
        self.path = path
        self.problem = problem
        self.accepted = accepted

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.path, self.problem, self.accepted)


class LayoutError(KVStrataError, ValueError):
    """A KV-cache geometry makes no sense, or cannot be read with certainty."""


class TierError(KVStrataError):
    """A tier could not do what it was asked to do.

    Args:
        tier: the tier's name in the configuration.
        problem: what happened.
        keys: the chunk keys concerned, if any.
    """

    def __init__(self, tier: str, problem: str, keys: Iterable[bytes] = ()) -> None:
        super().__init__(f"tier {tier}: {problem}")
        self.tier = tier
        self.problem = problem
        self.keys = tuple(keys)

    def __reduce__(self) -> tuple[type[TierError], tuple[str, str, tuple[bytes, ...]]]:
        return type(self), (self.tier, self.problem, self.keys)


class TierUnavailable(TierError):  # noqa: N818 - named for the state it reports
    """The tier cannot be reached now; a later try may succeed."""


class TierTimeout(TierError, TimeoutError):  # noqa: N818
    """The tier did not answer before the deadline."""


class TierFull(TierError):  # noqa: N818
    """The tier has no room left and could free none."""


class ChunkCorrupt(TierError):  # noqa: N818
    """A chunk's size, checksum or fingerprint differs from what was written."""


class TransferError(KVStrataError):
    """A copy between device memory and host memory failed."""


class ModelError(KVStrataError, ValueError):
    """A model directory cannot be used; names the file, key or tensor and what was expected."""


class RequestError(KVStrataError, ValueError):
    """The embedded engine cannot serve a request; says what to change."""


class EngineError(KVStrataError):
    """The embedded engine lost a rank."""


class UnsupportedEngineError(KVStrataError, ImportError):
    """An engine lacks what its connector calls, or demands what it does not know."""


class ClosedError(KVStrataError):
    """The object was used after it was closed."""
