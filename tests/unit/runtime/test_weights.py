"""A model's weights have one name: equal for copies, another for any other weights."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from kvstrata.errors import ModelError
from kvstrata.runtime.weights import weights_digest

if TYPE_CHECKING:
    from pathlib import Path

BIG = 8 * 2**20


def a_model(folder: Path, *, tensors: int = 4, size: int = 1000) -> Path:
    """A folder with a safetensors file whose tensors are of this many bytes each."""
    folder.mkdir()
    header = {
        f"layer.{n}": {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [n * size, (n + 1) * size],
        }
        for n in range(tensors)
    }
    text = json.dumps(header).encode()
    data = bytes(n % 251 for n in range(size)) * tensors
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text("{}")
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_copy_has_the_same_name(tmp_path: Path) -> None:
    model = a_model(tmp_path / "one")
    copy = tmp_path / "elsewhere" / "two"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (1, 1))

    assert weights_digest(copy) == weights_digest(model)


@pytest.mark.parametrize("offset", [10, 16, -4000, -2001, -1])
def test_any_byte_of_a_small_file_counts(tmp_path: Path, offset: int) -> None:
    model = a_model(tmp_path / "model")
    before = weights_digest(model)
    flip(model / "model.safetensors", offset)

    assert weights_digest(model) != before


def test_the_header_of_a_big_file_counts(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", tensors=4, size=BIG // 4)
    before = weights_digest(model)
    flip(model / "model.safetensors", 12)

    assert weights_digest(model) != before


def test_each_tensor_of_a_big_file_counts(tmp_path: Path) -> None:
    """Of a fine-tuned model little may differ: a tensor that no sample meets would go unnoticed."""
    num_tensors = 2000
    model = a_model(tmp_path / "model", tensors=num_tensors, size=BIG // num_tensors)
    path = model / "model.safetensors"
    before = weights_digest(model)
    data = path.stat().st_size - num_tensors * (BIG // num_tensors)
    for tensor in (0, 1, 777, 778, 1999):
        offset = data + tensor * (BIG // num_tensors)
        flip(path, offset)
        assert weights_digest(model) != before, f"tensor {tensor}"
        flip(path, offset)
    assert weights_digest(model) == before


def test_the_size_counts(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", tensors=4, size=BIG // 4)
    before = weights_digest(model)
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\0")

    assert weights_digest(model) != before


def test_the_configuration_counts(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    before = weights_digest(model)
    (model / "config.json").write_text('{"rope_theta": 1}')

    assert weights_digest(model) != before


def test_a_file_more_counts(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    before = weights_digest(model)
    shutil.copy(model / "model.safetensors", model / "more.safetensors")

    assert weights_digest(model) != before


def test_a_large_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", tensors=4, size=1000)
    os.truncate(model / "model.safetensors", 100 * 2**30)  # sparse
    start = time.monotonic()
    weights_digest(model)

    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 100, (50).to_bytes(8, "little") + b"x"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    model = a_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match="safetensors"):
        weights_digest(model)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors"):
        weights_digest(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    (model / "config.json").unlink()

    with pytest.raises(ModelError, match="cannot be read"):
        weights_digest(model)
