"""One rank's host memory for chunks: bytes, nothing else.

A mapping of its own, or a named one in shared memory when two processes need the same bytes. Huge
pages are asked for where the system has them; where there is a GPU the mapping is pinned, so that
copies to it run at full speed without a staging buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Final

from kvstrata.core.chunk_label import ChunkBuffer
from kvstrata.errors import ConfigError
from kvstrata.tiers.memory_limits import available_bytes
from kvstrata.tiers.numa import touch_on_node
from kvstrata.tiers.room import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata.core.chunk_label import ChunkLabel
    from kvstrata.tiers.room import Extent

_HUGE_PAGE: Final = getattr(mmap, "MADV_HUGEPAGE", None)
_PORTABLE: Final = 1
_MAPPED: Final = 2
"""How memory is registered: for every context, and within the reach of kernels."""
_SHARED_FOLDER: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies on Linux


class HostArena:
    """Memory for chunks, addressed by extents.

    Args:
        capacity_bytes: rounded down to whole pages.
        shared_name: a name under which other processes find the same memory; None: private.
        numa_node: where the memory should lie (`numa.node_of_device`); None: wherever it falls.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(
        self, capacity_bytes: int, shared_name: str | None = None, numa_node: int | None = None
    ) -> None:
        _check_memory(capacity_bytes)
        self.num_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES
        self._shared_path = shared_name and f"{_SHARED_FOLDER}/{shared_name}"
        self.is_pinned = False
        """Whether a GPU reads and writes it straight over the bus."""
        self._is_new = True
        try:
            self._memory = self._map()
        except (OSError, ValueError) as error:
            raise ConfigError(
                "host.capacity", f"{capacity_bytes} bytes cannot be had: {error}", "less"
            ) from error
        if _HUGE_PAGE is not None:
            with contextlib.suppress(OSError):  # a kernel without them is no fault
                self._memory.madvise(_HUGE_PAGE)
        self._view = memoryview(self._memory)
        if numa_node is not None and self._is_new:
            touch_on_node(self._view, numa_node, PAGE_BYTES)

    def parts(self, extents: Iterable[Extent]) -> tuple[memoryview, ...]:
        """The memory of some extents."""
        return tuple(self._view[e.offset : e.offset + e.num_bytes] for e in extents)

    def buffer(self, label: ChunkLabel, extents: Iterable[Extent]) -> ChunkBuffer:
        """A chunk with its memory."""
        return ChunkBuffer(label, self.parts(extents))

    def pin(self) -> bool:
        """Register the memory with the GPU driver; whether there is one. Idempotent."""
        if not self.is_pinned:
            self.is_pinned = _register(self._view)
        return self.is_pinned

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Give the memory back, and its name. Does nothing on successive calls.

        Raises:
            BufferError: somebody still holds a part of it.
        """
        if self.is_pinned:
            _unregister(self._view)
            self.is_pinned = False
        self._view.release()
        self._memory.close()
        if self._shared_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._shared_path)  # noqa: PTH108
            self._shared_path = None

    def _map(self) -> mmap.mmap:
        if not self._shared_path:
            return mmap.mmap(-1, self.num_bytes)
        fd = self._open_shared(self._shared_path)
        try:
            os.posix_fallocate(fd, 0, self.num_bytes)  # now, not as a bus error later
            return mmap.mmap(fd, self.num_bytes)
        except OSError:
            os.unlink(self._shared_path)  # noqa: PTH108
            raise
        finally:
            os.close(fd)

    def _open_shared(self, path: str) -> int:
        """Make the shared memory, or find what another process made."""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._is_new = False
            return os.open(path, flags)


def _check_memory(capacity_bytes: int) -> None:
    """Refuse now what would end in the kernel's killing of a process later.

    Raises:
        ConfigError: there is not so much memory.
    """
    available = available_bytes()
    if available is not None and capacity_bytes > available:
        raise ConfigError(
            "host.capacity",
            f"{capacity_bytes / 2**30:.1f} GiB for each rank, but {available / 2**30:.1f} GiB are "
            f"available",
            "less",
        )


def _register(view: memoryview) -> bool:
    import torch  # noqa: PLC0415 - only a rank with a GPU gets here

    if not torch.cuda.is_available():
        return False
    memory = torch.frombuffer(view, dtype=torch.uint8)
    flags = _PORTABLE | _MAPPED
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags)) == 0


def _unregister(view: memoryview) -> None:
    import torch  # noqa: PLC0415

    torch.cuda.cudart().cudaHostUnregister(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
