from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvstrata.config import parse_config
from kvstrata.core.chunk_label import Rank
from kvstrata.errors import ConfigError
from kvstrata.testing.chunks import a_label, a_namespace, filled, within
from kvstrata.tiers.filesystem import FilesystemStore
from kvstrata.tiers.registry import open_store

if TYPE_CHECKING:
    from pathlib import Path


def test_a_kind_is_opened_by_its_name(tmp_path: Path) -> None:
    config = parse_config({"tiers": [{"kind": "filesystem", "path": str(tmp_path / "store")}]})

    store = open_store(config.tiers[0], a_namespace(), Rank())

    assert isinstance(store, FilesystemStore)
    store.close()


def test_a_tier_written_elsewhere_is_opened_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_tier.py").write_text(
        "from kvstrata.testing.memory_store import MemoryStore\n"
        "def Shelf(config, namespace, rank):\n"
        "    store = MemoryStore(rank)\n"
        "    store.color = config.options['color']\n"
        "    return store\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tier = {"kind": "custom", "store": "their_tier:Shelf", "options": {"color": "red"}}
    config = parse_config({"tiers": [tier]})

    store = open_store(config.tiers[0], a_namespace(), Rank())

    assert store.color == "red"  # type: ignore[attr-defined]
    label = a_label(1)
    assert store.write([filled(label)], within(1)).done == {label.key}


@pytest.mark.parametrize(
    ("path", "problem"),
    [("nowhere.at_all:Store", "cannot be imported"), ("kvstrata.errors:Nothing", "names no class")],
)
def test_a_class_that_is_not_there_is_named(path: str, problem: str) -> None:
    config = parse_config({"tiers": [{"kind": "custom", "store": path}]})

    with pytest.raises(ConfigError, match=f"store: {path} {problem}"):
        open_store(config.tiers[0], a_namespace(), Rank())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for module in [name for name in sys.modules if name.startswith("kvstrata.tiers.valkey")]:
        monkeypatch.delitem(sys.modules, module)
    config = parse_config({"tiers": [{"kind": "valkey", "url": "valkey://nowhere:1"}]})

    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[valkey\]'"):
        open_store(config.tiers[0], a_namespace(), Rank())
