from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.config.schema import FilesystemTierConfig
from kvstrata.core.chunk_label import Rank
from kvstrata.operations.directory_listing import DirectoryListing
from kvstrata.testing.chunks import a_label, a_namespace, filled, within
from kvstrata.tiers.filesystem import FilesystemStore

if TYPE_CHECKING:
    from pathlib import Path


class MadeStore:
    """A store on real files, whose processes are gone."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, *numbers: int, weights: str = "weights", rank: Rank | None = None) -> None:
        config = FilesystemTierConfig(path=str(self.root), durability="none")
        store = FilesystemStore(config, a_namespace(weights), rank or Rank())
        outcome = store.write([filled(a_label(number)) for number in numbers], within(30))
        store.close()
        DirectoryListing(self.root).correct_usage()  # a janitor that starts may count twice
        assert len(outcome.done) == len(numbers)

    def path(self, number: int, weights: str = "weights") -> Path:
        name = a_label(number).key.hex()
        folder = self.root / "namespaces" / a_namespace(weights).fingerprint
        (path,) = folder.glob(f"{name[:2]}/{name}.*")
        return path

    def files(self) -> set[Path]:
        return {path for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> MadeStore:
    made = MadeStore(tmp_path / "store")
    made.write(1, 2, 3)
    return made
