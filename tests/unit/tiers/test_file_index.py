from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.chunk_label import Rank
from kvstrata.core.ids import ChunkKey
from kvstrata.tiers.file_index import complete_keys
from kvstrata.tiers.file_layout import file_name

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO, THREE = (ChunkKey(bytes([number, number, 7])) for number in (1, 2, 3))


def put(folder: Path, key: ChunkKey, *ranks: int, count: int) -> None:
    for index in ranks:
        put_name(folder, file_name(key, Rank(index, count)))


def put_name(folder: Path, name: str, *, under: str | None = None) -> None:
    place = folder / (name[:2] if under is None else under)
    place.mkdir(exist_ok=True)
    (place / name).touch()


def test_a_chunk_counts_when_every_rank_has_it(tmp_path: Path) -> None:
    put(tmp_path, ONE, 0, 1, count=2)
    put(tmp_path, TWO, 1, count=2)
    put(tmp_path, THREE, 0, count=1)

    assert complete_keys(tmp_path, 2) == {ONE}
    assert complete_keys(tmp_path, 1) == {THREE}
    assert complete_keys(tmp_path, 3) == set()


def test_ranks_of_two_digits_are_told_apart(tmp_path: Path) -> None:
    put(tmp_path, ONE, *range(11), count=11)
    put(tmp_path, TWO, *range(1, 11), count=11)

    assert complete_keys(tmp_path, 11) == {ONE}
    assert complete_keys(tmp_path, 1) == set()


def test_other_names_are_no_chunks(tmp_path: Path) -> None:
    put(tmp_path, ONE, 0, count=1)
    for name in ("01zz.0of1", "010.0of1", "01 01.0of1", "01AB.0of1", "01ab", "01ab.0of1.old"):
        put_name(tmp_path, name)
    put_name(tmp_path, ".host-1-1.tmp", under="01")
    put_name(tmp_path, file_name(TWO, Rank()), under="01")
    (tmp_path / "a file").touch()

    assert complete_keys(tmp_path, 1) == {ONE}


def test_a_missing_folder_holds_nothing(tmp_path: Path) -> None:
    assert complete_keys(tmp_path / "none", 1) == set()
