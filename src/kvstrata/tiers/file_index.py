"""Which chunks a directory holds, from file names alone.

A store of a million chunks must be known within seconds of a start: names are listed a folder at a
time, no file is opened or asked about, and the ranks of a chunk meet as sets.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstrata.core.chunk_label import Rank
from kvstrata.core.ids import ChunkKey
from kvstrata.tiers.file_layout import file_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def complete_keys(namespace_folder: Path, num_ranks: int) -> set[ChunkKey]:
    """The chunks that every one of `num_ranks` ranks has a file of.

    Files of other numbers of ranks, files being written and files in a folder that is not theirs
    do not count. A folder that is missing holds nothing. Blocks as long as the file system does.

    Raises:
        OSError: as the file system says.
    """
    keys: set[ChunkKey] = set()
    suffixes = [file_name(ChunkKey(b""), Rank(index, num_ranks)) for index in range(num_ranks)]
    for prefix in _names(namespace_folder):
        names = [name for name in _names(namespace_folder / prefix) if name.startswith(prefix)]
        keys.update(_keys(set.intersection(*(_stems(names, suffix) for suffix in suffixes))))
    return keys


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - a path object for each name takes longer
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stems(names: Iterable[str], suffix: str) -> set[str]:
    return {name.removesuffix(suffix) for name in names if name.endswith(suffix)}


def _keys(stems: Iterable[str]) -> Iterable[ChunkKey]:
    for stem in stems:
        try:
            key = bytes.fromhex(stem)
        except ValueError:
            continue
        if key.hex() == stem:  # else the key's own file has another name
            yield ChunkKey(key)
