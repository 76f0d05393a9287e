"""An engine's cache tensors behind their canonical form, ready to be copied from and to.

The payload of a chunk is, piece after piece of its group, that piece's rows in the order of the
tokens: for each layer one dense block of bytes, so a copy is one gather or scatter per piece.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvstrata.core.cache_reduction import reduce_kv_caches
from kvstrata.core.canonical import TensorView
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata.core.canonical import ByteMatrix, CanonicalKVCaches
    from kvstrata.core.ids import GroupId
    from kvstrata.core.layout import KVLayout

LayerCache = torch.Tensor | list[torch.Tensor]
"""One tensor, or the parts of a recurrent state."""


def describe(tensor: torch.Tensor, *, block_axis: int | None = None) -> TensorView:
    """Where a tensor's elements lie, as plain numbers."""
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    return TensorView(
        storage=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        offset_bytes=int(tensor.storage_offset()) * itemsize,
        shape=tuple(tensor.shape),
        strides_bytes=tuple(stride * itemsize for stride in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=itemsize,
        block_axis=block_axis,
    )


class CacheViews:
    """The caches of one rank as byte matrices over the engine's own memory.

    Args:
        layout: the model's groups.
        caches: the engine's tensors by layer name.
        num_blocks: blocks in the engine's pool.
        block_axes: which axis counts kernel blocks, for layers whose shape leaves it open.

    Raises:
        LayoutError: a tensor cannot be reduced with certainty.
    """

    def __init__(
        self,
        layout: KVLayout,
        caches: Mapping[str, LayerCache],
        num_blocks: int,
        block_axes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        tensors = {name: _as_list(cache) for name, cache in caches.items()}
        views = {
            name: [describe(tensor, block_axis=block_axes.get(name)) for tensor in parts]
            for name, parts in tensors.items()
        }
        self.canonical: CanonicalKVCaches = reduce_kv_caches(layout, views, num_blocks)
        storages = {
            t.untyped_storage().data_ptr(): _bytes_of(t) for ts in tensors.values() for t in ts
        }
        matrices = [_matrix(storages[m.storage], m) for m in self.canonical.matrices]
        self.pieces = [
            [matrices[p.matrix][:, p.start : p.start + p.length] for p in pages.pieces]
            for pages in self.canonical.groups
        ]
        """The pieces of each group, one row of bytes for each of its rows."""
        self.device = matrices[0].device

    def gather(self, group_id: GroupId, rows: Sequence[int]) -> torch.Tensor:
        """Copy rows of a group out, as one payload on the caches' device."""
        num_bytes = self.canonical.groups[group_id].row_bytes * len(rows)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.gather_into(payload, group_id, rows)
        return payload

    def gather_into(self, payload: torch.Tensor, group_id: GroupId, rows: Sequence[int]) -> None:
        """Copy rows of a group into a payload of their size, on the caches' device.

        One operation for each piece: every one more is a turn at the interpreter's lock that an
        engine in the same process waits for.
        """
        index = self._index(rows)
        pieces = self.pieces[group_id]
        parts = payload.split([piece.shape[1] * len(rows) for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            torch.index_select(piece, 0, index, out=part.view(len(rows), -1))

    def scatter(
        self, group_id: GroupId, rows: Sequence[int], payload: torch.Tensor, *, first_row: int = 0
    ) -> None:
        """Copy rows of a payload back in.

        Args:
            group_id: whose payload it is.
            rows: where the payload's rows go, from `first_row` on; those behind are left out.
            payload: as `gather` made it.
            first_row: rows of the payload before the first to copy.

        Raises:
            LayoutError: the payload has not so many rows, or not whole ones.
        """
        pages = self.canonical.groups[group_id]
        num_rows, rest = divmod(payload.numel(), pages.row_bytes)
        if rest or first_row + len(rows) > num_rows:
            raise LayoutError(
                f"group {group_id}: payload of {payload.numel()} bytes for rows "
                f"[{first_row}, {first_row + len(rows)}) of {pages.row_bytes} bytes"
            )
        index = self._index(rows)
        pieces = self.pieces[group_id]
        parts = payload.split([piece.shape[1] * num_rows for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            source = part.view(num_rows, -1)[first_row : first_row + len(rows)]
            piece.index_copy_(0, index, source)

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self.device)


def _as_list(cache: LayerCache) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor, as bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _matrix(storage: torch.Tensor, matrix: ByteMatrix) -> torch.Tensor:
    return storage.as_strided(
        (matrix.num_rows, matrix.row_bytes), (matrix.row_stride, 1), matrix.offset
    )
