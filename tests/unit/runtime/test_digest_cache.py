"""A digest is computed once for each state of a file, and never found for another state."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.runtime.digest_cache import DigestCache, user_digests

if TYPE_CHECKING:
    from pathlib import Path

LATER = 10 * 10**9


class Bed:
    """A file, and a cache that thinks it is later."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "file"
        self.path.write_bytes(b"one")
        self.folder = tmp_path / "cache" / "deep"
        self.computed = 0

    def digest(self, *, scheme: str = "scheme", later_ns: int = LATER) -> bytes:
        """As another process would ask."""
        cache = DigestCache(self.folder, scheme, lambda: time.time_ns() + later_ns)
        return cache.digest(self.path, self._compute)

    def _compute(self, path: Path) -> bytes:
        self.computed += 1
        return path.read_bytes()


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_it_is_computed_once(bed: Bed) -> None:
    assert bed.digest() == b"one"
    assert bed.digest() == b"one"
    assert bed.computed == 1


def test_a_change_is_seen_though_size_and_time_are_as_before(bed: Bed) -> None:
    bed.digest()
    before = bed.path.stat()
    time.sleep(0.02)
    bed.path.write_bytes(b"two")
    os.utime(bed.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert bed.digest() == b"two"


def test_another_file_in_its_place_is_seen(bed: Bed) -> None:
    bed.digest()
    other = bed.path.with_name("other")
    other.write_bytes(b"two")
    other.replace(bed.path)

    assert bed.digest() == b"two"


def test_a_file_that_has_just_changed_is_computed_again(bed: Bed) -> None:
    bed.digest(later_ns=0)
    bed.digest(later_ns=0)

    assert bed.computed == 2


def test_another_scheme_is_another_digest(bed: Bed) -> None:
    bed.digest(scheme="old")
    bed.digest(scheme="new")

    assert bed.computed == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stamp": "x"}', b"\xff\xfe"])
def test_a_damaged_file_is_computed_again(bed: Bed, content: bytes) -> None:
    bed.digest()
    [kept] = bed.folder.iterdir()
    kept.write_bytes(content)

    assert bed.digest() == b"one"
    assert bed.digest() == b"one"
    assert bed.computed == 2


def test_a_folder_that_cannot_be_made_costs_a_computation(bed: Bed) -> None:
    bed.folder.parent.write_bytes(b"a file is in the way")

    assert bed.digest() == b"one"
    assert bed.digest() == b"one"


def test_without_a_folder_nothing_is_kept(bed: Bed) -> None:
    cache = DigestCache(None, "scheme")

    assert cache.digest(bed.path, lambda path: path.read_bytes()) == b"one"


def test_a_file_that_is_not_there_is_an_error_of_the_system(bed: Bed) -> None:
    bed.path.unlink()

    with pytest.raises(FileNotFoundError):
        bed.digest()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_digests_are_kept_where_the_user_keeps_such_things(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "user"))
    monkeypatch.setattr("kvstrata.runtime.digest_cache._REST_NS", -LATER)
    user_digests("files", "scheme").digest(bed.path, lambda path: path.read_bytes())

    folder = "kvstrata/files" if variable == "XDG_CACHE_HOME" else ".cache/kvstrata/files"
    assert len(list((tmp_path / "user" / folder).iterdir())) == 1
