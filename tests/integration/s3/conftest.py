from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstrata.core.chunk_label import Rank
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.servers import s3_server
from kvstrata.tiers.object_store import BucketStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstrata.config.schema import ObjectStoreTierConfig
    from kvstrata.testing.servers import ServerProcess

    OpenStore = Callable[[ObjectStoreTierConfig], BucketStore]

BUCKET = "chunks"
SECRET = "a-key-nobody-knows"  # noqa: S105 - the test server takes any


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with s3_server(tmp_path_factory.mktemp("s3"), BUCKET) as process:
        yield process


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may harm."""
    with s3_server(tmp_path, BUCKET) as process:
        yield process


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    stores: list[BucketStore] = []

    def opened(config: ObjectStoreTierConfig) -> BucketStore:
        stores.append(BucketStore(config, a_namespace(), Rank()))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()
