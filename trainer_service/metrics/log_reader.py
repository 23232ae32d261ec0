"""Reading a file of JSON lines up to where it ended when it was opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Generic, Self, TypeVar

import msgspec

from trainer_service.metrics.rows import Stored

R = TypeVar("R", bound=Stored)


class LogReader(Generic[R]):
    """The rows of a file that was opened, some of its first ones left out. A context manager."""

    def __init__(
        self,
        decoder: msgspec.json.Decoder[R],
        file: BinaryIO,
        start: int = 0,
        end: int = 0,
        after: int = 0,
    ) -> None:
        """Read rows with higher numbers than `after` between two positions of a file, which is closed with this."""
        self._decoder = decoder
        self._file = file
        self._start, self._end = start, end
        self._after = after

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def rows(self) -> Iterator[tuple[int, R]]:
        """Yield position and row of each line, in order. Lines that cannot be read are left out. Raises OSError."""
        for offset, line in whole_lines(self._file, self._start):
            if offset + len(line) > self._end:
                return
            try:
                row = self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if row.number > self._after:
                yield offset, row

    def row_at(self, offset: int) -> R:
        """Return the row at a position that `rows` has yielded. Raises OSError."""
        self._file.seek(offset)
        return self._decoder.decode(self._file.readline())


def whole_lines(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield position and content of each line that ends, from a position on."""
    file.seek(start)
    offset = start
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield offset, line
        offset += len(line)
