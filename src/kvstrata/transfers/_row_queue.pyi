# `kvstrata.transfers.native_queue.RowQueue` in C.

from typing import Self

class RowQueue:
    def __new__(
        cls,
        arena: memoryview,
        page_bytes: int,
        groups: tuple[tuple[bytes, int], ...],
        at_once_bytes: int,
        /,
    ) -> Self: ...
    def submit(
        self,
        job_id: int,
        is_load: bool,
        chunks: tuple[tuple[int, tuple[tuple[int, int], ...], int, tuple[int, ...], int], ...],
        /,
    ) -> None: ...
    def take(self) -> list[tuple[int, int, float]]: ...
    def work(self) -> None: ...
    def close(self) -> None: ...
