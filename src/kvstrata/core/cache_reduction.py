"""Reduces an engine's registered cache tensors to `CanonicalKVCaches`, once, at registration.

Every layer's tensors become *runs*: byte ranges that repeat at one stride, once per kernel block.
Runs that lie side by side in the same rows are gathered into one matrix, whichever layers or
groups they belong to. A tensor whose bytes cannot be attributed with certainty is refused: copying
a guess would be a wrong answer later.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata.core.canonical import (
    ByteMatrix,
    BytePiece,
    CanonicalKVCaches,
    GroupPages,
    TensorView,
)
from kvstrata.core.ids import GroupId
from kvstrata.core.layout import GroupKind
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstrata.core.layout import KVGroup, KVLayer, KVLayout

    Caches = Mapping[str, Sequence[TensorView]]

_KEYS_AND_VALUES: Final = 2
_RAW_BYTES: Final = ("int8", "uint8")


class _Run(NamedTuple):
    """Consecutive bytes of each row of one layer."""

    storage: int
    row_stride: int
    num_rows: int
    offset: int
    length: int


def reduce_kv_caches(layout: KVLayout, caches: Caches, num_blocks: int) -> CanonicalKVCaches:
    """Reduce an engine's registered caches to byte matrices.

    Args:
        layout: the groups; their layers name the caches.
        caches: per layer its tensors: one, or several for a state kept in parts.
        num_blocks: blocks in the engine's pool.

    Raises:
        LayoutError: names the layer, its shape and strides, and what was expected.
    """
    if num_blocks < 1:
        raise LayoutError(f"num_blocks is {num_blocks}, but must be at least 1")
    _check_all_are_known(layout, caches)
    groups = [
        [_ReducedLayer(group, layer, caches, num_blocks) for layer in group.layers]
        for group in layout.groups
    ]
    matrices, places = _gather(run for layers in groups for layer in layers for run in layer.runs)
    for layers in groups:
        _check_apart(layers, matrices, places)
    arrangements = [[layer.arrangement for layer in layers] for layers in groups]
    return CanonicalKVCaches(
        num_blocks=num_blocks,
        matrices=tuple(matrices),
        groups=tuple(
            GroupPages(
                GroupId(index),
                layout.groups[index].rows_per_block,
                tuple(places[run] for layer in layers for run in layer.runs),
            )
            for index, layers in enumerate(groups)
        ),
        page_encoding=hashlib.sha256(f"kvstrata/pages/1:{arrangements}".encode()).hexdigest(),
    )


def _check_all_are_known(layout: KVLayout, caches: Caches) -> None:
    """Refuse a missing cache, and one in no group unless it is a second name for one that is."""
    names = [layer.name for group in layout.groups for layer in group.layers]
    for name in names:
        if not caches.get(name):
            raise LayoutError(f"layer {name!r}: expected a cache, the engine registered none")
    known = {tuple(caches[name]) for name in names}
    for name, tensors in caches.items():
        if name not in names and tuple(tensors) not in known:
            raise LayoutError(
                f"layer {name!r}: {_describe(tensors)}; expected a layer that some group names, "
                f"or a tensor shared with one"
            )


class _ReducedLayer:
    """One layer of one group, as runs."""

    def __init__(self, group: KVGroup, layer: KVLayer, caches: Caches, num_blocks: int) -> None:
        self.name = layer.name
        self.kind = group.kind
        tensors = caches[layer.name]
        num_rows = num_blocks * group.rows_per_block
        parts = [_ReducedTensor(group.kind, layer.name, tensor, num_rows) for tensor in tensors]
        row_bytes = layer.page_bytes // group.rows_per_block
        found = sum(part.row_bytes for part in parts)
        if found > row_bytes and len(parts) == 1 and parts[0].is_flat_state:
            parts[0].trim(row_bytes)
        elif found != row_bytes:
            raise LayoutError(
                f"layer {layer.name!r} ({group.kind} group): {_describe(tensors)}; expected "
                f"{row_bytes} bytes per kernel block ({layer.page_bytes} per block in "
                f"{group.rows_per_block}), found {found}"
            )
        self.runs = tuple(run for part in parts for run in part.runs())
        self.arrangement = [part.arrangement for part in parts]


class _ReducedTensor:
    """One tensor of a layer, taken apart into its block axis and the axes inside a row."""

    def __init__(self, kind: GroupKind, layer: str, tensor: TensorView, num_rows: int) -> None:
        self._kind = kind
        self._layer = layer
        self._tensor = tensor
        self._num_rows = num_rows
        block_axis = self._block_axis()
        self._row_stride = tensor.strides_bytes[block_axis]
        self._axes = sorted(
            (axis for axis, size in enumerate(tensor.shape) if axis != block_axis and size != 1),
            key=lambda axis: -tensor.strides_bytes[axis],
        )
        self._length, self._outer = self._dense_part()
        self.row_bytes = self._length * math.prod(size for size, _ in self._outer)

    @property
    def arrangement(self) -> str:
        """How values are arranged in a row: dtype, the inner axes by address, and its runs.

        The runs belong to it because a payload is laid out run by run.
        """
        axes = [(axis, self._tensor.shape[axis]) for axis in self._axes]
        return f"{self._tensor.dtype}{axes}{[run.length for run in self.runs()]}"

    @property
    def is_flat_state(self) -> bool:
        """Whether a row is one plain run of bytes, which an engine may have padded at its end."""
        is_flat = self._tensor.dtype in _RAW_BYTES and len(self._axes) <= 1 and not self._outer
        return is_flat and self._kind is GroupKind.RECURRENT

    def trim(self, row_bytes: int) -> None:
        """Leave the padding at the end of each row out."""
        self._length = self.row_bytes = row_bytes

    def runs(self) -> tuple[_Run, ...]:
        """The consecutive byte ranges of a row, by address."""
        starts = [0]
        for size, stride in reversed(self._outer):
            starts = [index * stride + start for index in range(size) for start in starts]
        starts.sort()
        if any(after - before < self._length for before, after in itertools.pairwise(starts)):
            raise self._refusal("elements that do not overlap")
        if self._num_rows > 1 and self._row_stride < self._length:
            raise self._refusal(f"kernel blocks at least {self._length} bytes apart")
        tensor = self._tensor
        first, last_row = tensor.offset_bytes, (self._num_rows - 1) * self._row_stride
        end = first + last_row + starts[-1] + self._length
        if end > tensor.storage_bytes:
            raise self._refusal(f"at least {end} bytes of storage, found {tensor.storage_bytes}")
        return tuple(
            _Run(tensor.storage, self._row_stride, self._num_rows, first + start, self._length)
            for start in starts
        )

    def _dense_part(self) -> tuple[int, list[tuple[int, int]]]:
        """The length of a consecutive run, and (size, stride) of the axes it repeats along."""
        shape, strides = self._tensor.shape, self._tensor.strides_bytes
        length = self._tensor.itemsize
        outer = [(shape[axis], strides[axis]) for axis in self._axes]
        while outer and outer[-1][1] == length:
            length *= outer.pop()[0]
        if any(stride < length for _, stride in outer):
            raise self._refusal("elements that do not overlap")
        return length, outer

    def _block_axis(self) -> int:
        shape, rows = self._tensor.shape, self._num_rows
        if (declared := self._tensor.block_axis) is not None:
            if declared < len(shape) and shape[declared] == rows:
                return declared
            raise self._refusal(f"{rows} kernel blocks on axis {declared}")
        leads = shape[:1] == (rows,)
        follows = shape[:2] == (_KEYS_AND_VALUES, rows)
        if leads and follows:
            raise self._refusal(f"one axis of {rows} kernel blocks, or a declared block_axis")
        if not leads and not follows:
            raise self._refusal(
                f"{rows} kernel blocks on axis 0, or on axis 1 behind an axis of keys and values"
            )
        return 0 if leads else 1

    def _refusal(self, expected: str) -> LayoutError:
        return LayoutError(
            f"layer {self._layer!r} ({self._kind} group): {self._tensor}; expected {expected}"
        )


def _gather(runs: Iterable[_Run]) -> tuple[list[ByteMatrix], dict[_Run, BytePiece]]:
    """Gather runs that lie in the same rows into one matrix each."""
    families: dict[tuple[int, int, int], set[_Run]] = defaultdict(set)
    for run in runs:
        families[run.storage, run.row_stride, run.num_rows].add(run)
    matrices: list[ByteMatrix] = []
    places: dict[_Run, BytePiece] = {}
    for (storage, stride, num_rows), family in sorted(families.items()):
        for offset, members in _split_by_row(family, stride):
            end = max(run.offset + run.length for run in members)
            for run in members:
                places[run] = BytePiece(len(matrices), run.offset - offset, run.length)
            matrices.append(ByteMatrix(storage, offset, num_rows, stride, end - offset))
    return matrices, places


def _split_by_row(family: Iterable[_Run], stride: int) -> list[tuple[int, list[_Run]]]:
    """Split runs of one stride so that each part fits into a row of that stride."""
    parts: list[tuple[int, list[_Run]]] = []
    for run in sorted(family, key=lambda run: (run.offset, run.length)):
        if parts and run.offset + run.length <= parts[-1][0] + stride:
            parts[-1][1].append(run)
        else:
            parts.append((run.offset, [run]))
    return parts


def _check_apart(
    layers: Sequence[_ReducedLayer],
    matrices: Sequence[ByteMatrix],
    places: Mapping[_Run, BytePiece],
) -> None:
    """Refuse a group in which one byte belongs to two layers or to two blocks.

    Different groups may overlay each other: a block belongs to one group at a time.
    """
    pieces = sorted(
        (piece.matrix, piece.start, piece.start + piece.length, layer.name)
        for layer in layers
        for piece in (places[run] for run in layer.runs)
    )
    for (matrix, _, end, name), (other_matrix, start, _, other) in itertools.pairwise(pieces):
        if matrix == other_matrix and start < end:
            raise LayoutError(
                f"layers {name!r} and {other!r} ({layers[0].kind} group) share bytes "
                f"[{start}, {end}) of each row; expected layers of one group apart: of layers "
                f"that share a tensor only one belongs into the group"
            )
    used = sorted(
        (matrices[index] for index in {piece[0] for piece in pieces}),
        key=lambda matrix: (matrix.storage, matrix.offset),
    )
    for before, after in itertools.pairwise(used):
        if before.storage == after.storage and after.offset < before.end:
            raise LayoutError(
                f"{layers[0].kind} group of layer {layers[0].name!r}: rows interleave in bytes "
                f"[{after.offset}, {before.end}); expected layers apart, or side by side in rows "
                f"of one stride"
            )


def _describe(tensors: Sequence[TensorView]) -> str:
    return " and ".join(map(str, tensors))
