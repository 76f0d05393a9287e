# `kvstrata.transfers.native_copier.RowCalls` in C, outside the interpreter's lock.

def load(
    pieces: bytes,
    num_rows: int,
    rows: tuple[int, ...],
    parts: tuple[memoryview, ...],
    num_bytes: int,
    first_row: int,
    /,
) -> None: ...
def store(
    pieces: bytes,
    num_rows: int,
    rows: tuple[int, ...],
    parts: tuple[memoryview, ...],
    num_bytes: int,
    first_row: int,
    /,
) -> None: ...
