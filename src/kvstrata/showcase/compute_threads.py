"""How many threads compute while something is measured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Compute on so many threads meanwhile: the other cores are for moving bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
