from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.testing.tier_contract import TierContract
from kvstrata.tiers.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstrata.core.chunk_label import Namespace, Rank
    from kvstrata.core.ids import ChunkKey


class Directory:
    """One directory that several stores share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[FilesystemStore] = []

    def open(self, namespace: Namespace, rank: Rank) -> FilesystemStore:
        config = FilesystemTierConfig(path=str(self.path), durability="none")
        self.opened.append(FilesystemStore(config, namespace, rank))
        return self.opened[-1]

    def damage(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        (path,) = self.path.glob(f"namespaces/*/*/{key.hex()}.*")
        path.write_bytes(change(path.read_bytes()))


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "store")
    yield directory
    for store in directory.opened:
        store.close()


class TestFilesystemStore(TierContract):
    """The contract, on real files."""
