"""vLLM's own filesystem tier, where vLLM is installed, doing the same work beside ours.

It writes no header, no checksum and no sync, and checks nothing but a short read; with its native
extension a whole batch runs outside the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstrata.core.chunk_label import ChunkBuffer


def vllm_file_calls() -> Any | None:  # noqa: ANN401 - a module of theirs
    """The module with vLLM's file calls; None when there is none to be had."""
    try:
        return importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
    except Exception:  # noqa: BLE001 - whatever its import fails with, there is no peer to measure
        return None


def describe_vllm(calls: Any | None) -> str:  # noqa: ANN401
    """One sentence for a report's setting."""
    if calls is None:
        return "vLLM not installed"
    version = importlib.import_module("vllm").__version__
    how = "native" if calls._HAS_FSIO_C else "Python"  # noqa: SLF001 - nothing public tells
    return f"beside it vLLM {version}'s filesystem tier ({how} file calls, no checksums)"


class VllmFiles:
    """Chunks as files through vLLM's calls.

    Args:
        calls: its module.
        folder: where the files lie; made if missing.
        direct: whether to go past the page cache.
    """

    def __init__(self, calls: Any, folder: Path, *, direct: bool) -> None:  # noqa: ANN401
        self._calls = calls
        self._folder = folder
        self._direct = direct
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, chunks: Sequence[ChunkBuffer]) -> None:
        """Write one batch, as its tier does."""
        self._calls.batch_store_block(*self._batch(chunks), self._direct)

    def read(self, chunks: Sequence[ChunkBuffer]) -> None:
        """Read one batch, as its tier does."""
        self._calls.batch_load_block(*self._batch(chunks), self._direct)

    def _batch(self, chunks: Sequence[ChunkBuffer]) -> tuple[list[str], memoryview, list[int], int]:
        """Paths, one memory for all chunks, each one's offset in it, and their size."""
        memory = memoryview(chunks[0].parts[0].obj)
        start = _address(memory)
        paths = [f"{self._folder}/{c.label.key.hex()[:2]}/{c.label.key.hex()}" for c in chunks]
        offsets = [_address(chunk.parts[0]) - start for chunk in chunks]
        return paths, memory, offsets, chunks[0].parts[0].nbytes


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
