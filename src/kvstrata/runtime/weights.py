"""A name for the actual weights of a model directory, cheap enough for every start.

Every safetensors file gives its header (names, shapes, dtypes), its size, and samples of its data:
at fixed distances, and at the start of every tensor, because a fine-tuned model may differ in a few
small ones alone. A model's name or modification times play no part, so copies of one model share
their cache. What was read of a file is remembered until it is touched.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from kvstrata.errors import ModelError
from kvstrata.runtime.digest_cache import user_digests

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100 * 2**20
_METADATA: Final = "__metadata__"
_SCHEME: Final = "kvstrata/weights/1"


def weights_digest(folder: Path) -> str:
    """The digest of a model directory's config.json and safetensors.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors; expected the model's weights")
    digest = hashlib.sha256(_SCHEME.encode())
    known = user_digests("weights", _SCHEME)
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in files:
            digest.update(known.digest(path, _file_digest))
    except OSError as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(_LENGTH_BYTES, "little"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + header_bytes
        if start > size or header_bytes > _MOST_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file")
        header = file.read(header_bytes)
        digest.update(header)
        for place in _places(_tensor_starts(header, path), size - start):
            file.seek(start + place)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _tensor_starts(header: bytes, path: Path) -> list[int]:
    """Where the tensors begin, counted from the header's end."""
    try:
        tensors = json.loads(header)
        return [int(t["data_offsets"][0]) for name, t in tensors.items() if name != _METADATA]
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error!r}") from error


def _places(starts: list[int], num_bytes: int) -> list[int]:
    """Where to take samples; those of a small file cover all of it."""
    step = max(_SAMPLE_BYTES, num_bytes // _SAMPLES)
    return sorted({*range(0, num_bytes, step), *starts})
