"""What remains of any engine's cache tensors: rows of bytes.

Engines lay out KV caches in many ways: K and V apart or joined, heads before or after tokens, one
latent, a packed state, padded pages, several kernel blocks per block, layers or whole groups over
one storage. A copy needs none of that. It needs to know, for each group, which bytes belong to one
kernel block (a *row*), and where the rows lie:

    ByteMatrix   num_rows rows of row_bytes, row_stride apart, somewhere in one storage
    BytePiece    a byte range of a matrix's rows
    GroupPages   the pieces that make up one row of a group, in the order of its layers

`cache_reduction` gets there from tensors, which come in as plain numbers (`TensorView`): no torch
is needed to reason about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.core.ids import GroupId


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where one tensor's elements lie."""

    storage: int
    """Which allocation: equal for tensors that share one."""
    storage_bytes: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    itemsize: int
    block_axis: int | None = None
    """Which axis counts kernel blocks; None: found by its size."""

    def __str__(self) -> str:
        strides = tuple(stride // self.itemsize for stride in self.strides_bytes)
        return f"shape {self.shape}, strides {strides} of {self.dtype}"


@dataclass(frozen=True, slots=True)
class ByteMatrix:
    """Rows of bytes, at equal distances, inside one storage."""

    storage: int
    offset: int
    num_rows: int
    row_stride: int
    row_bytes: int

    @property
    def end(self) -> int:
        """One past the last byte of the last row."""
        return self.offset + (self.num_rows - 1) * self.row_stride + self.row_bytes


@dataclass(frozen=True, slots=True)
class BytePiece:
    """A range of bytes in every row of one matrix."""

    matrix: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The bytes of one kernel block of a group: its pieces, one after the other."""

    group_id: GroupId
    rows_per_block: int
    """Block b is made of rows [b * rows_per_block, (b + 1) * rows_per_block)."""
    pieces: tuple[BytePiece, ...]

    @property
    def row_bytes(self) -> int:
        """Real bytes of one row over all layers."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """Every KV cache of one rank, as byte matrices and each group's references into them."""

    num_blocks: int
    matrices: tuple[ByteMatrix, ...]
    groups: tuple[GroupPages, ...]
    page_encoding: str
    """Names how values are arranged inside pages. Bytes written under one encoding mean nothing
    under another, so it belongs into a namespace."""
