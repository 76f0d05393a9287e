"""A name for the actual weights of a model directory, cheap enough for every start.

Every safetensors file gives its header (names, shapes, dtypes), its size, and samples of its data
at fixed places. Two models that differ in their weights differ in the samples; a model's name or
modification times play no part, so copies of one model share their cache.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvstrata.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100 * 2**20


def weights_digest(folder: Path) -> str:
    """The digest of a model directory's config.json and safetensors.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors; expected the model's weights")
    digest = hashlib.sha256(b"kvstrata/weights/1")
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in files:
            digest.update(_file_digest(path))
    except OSError as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(_LENGTH_BYTES, "little"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > min(size, _MOST_HEADER_BYTES):
            raise ModelError(f"{path} is not a safetensors file")
        digest.update(file.read(header_bytes))
        _sample(file, _LENGTH_BYTES + header_bytes, size, digest)
    return digest.digest()


def _sample(file: BinaryIO, start: int, stop: int, digest: hashlib._Hash) -> None:
    """Take in samples at equal distances; a small file is taken in as a whole."""
    step = max(_SAMPLE_BYTES, (stop - start) // _SAMPLES)
    for offset in range(start, stop, step):
        file.seek(offset)
        digest.update(file.read(min(_SAMPLE_BYTES, stop - offset)))
