"""What a command needs and may not be installed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstrata.errors import KVStrataError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TORCH: Final = ("torch", "safetensors")


@contextmanager
def torch_wanted() -> Iterator[None]:
    """Say how to install what the engine needs.

    Raises:
        KVStrataError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _TORCH:
            raise
        raise KVStrataError(
            f"the engine needs {error.name}, which is not installed: pip install 'kvstrata[torch]'"
        ) from error
