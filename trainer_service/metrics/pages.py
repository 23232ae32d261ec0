"""Parts of a run's rows that fit a reply."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from trainer_service.metrics.log_file import LogFile
from trainer_service.metrics.rows import StoredRollout, StoredRow

_PAGE_BYTES = 1 << 20
"""Bytes after which nothing is added to a page, so that a caller with gRPC's usual limit of 4 MiB can receive it."""
_MOST_ROWS, _ROWS = 10_000, 1_000
_MOST_ROLLOUTS, _ROLLOUTS = 1_000, 100


@dataclass(frozen=True, slots=True)
class RowPage:
    """Some of a run's rows, in order."""

    rows: Sequence[StoredRow]
    next_after: int
    """Rows after this number have not been looked at."""


def next_rows(log: LogFile[StoredRow], after: int, names: Collection[str] = (), page_size: int = 0) -> RowPage:
    """Return the next rows after a number that have one of the named values, with only these. Raises OSError."""
    found: list[StoredRow] = []
    size, last, wanted = 0, after, frozenset(names)
    with log.opened(after) as reader:
        for _, stored in reader.rows():
            last = stored.number
            row = _with_values(stored, wanted)
            if row is None:
                continue
            found.append(row)
            size += _size_of(row)
            if len(found) >= (min(page_size, _MOST_ROWS) or _ROWS) or size >= _PAGE_BYTES:
                break
    return RowPage(found, last)


def thinned_rows(log: LogFile[StoredRow], after: int, names: Collection[str], most: int) -> RowPage:
    """Return all rows after a number that have one of the named values, thinned evenly to at most `most`.

    The first and the last are among them, unless `most` is 1: that is the last. Raises OSError.
    """
    places, wanted, last = array("Q"), frozenset(names), after
    most = min(most, _MOST_ROWS)
    with log.opened(after) as reader:
        for offset, row in reader.rows():
            last = row.number
            if _with_values(row, wanted) is not None:
                places.append(offset)
        while True:
            chosen = (_with_values(reader.row_at(places[index]), wanted) for index in evenly(len(places), most))
            found = [row for row in chosen if row is not None]
            if most <= 2 or sum(map(_size_of, found)) <= _PAGE_BYTES:
                return RowPage(found, last)
            most = max(most // 2, 2)


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, the first and the last among them if `most` > 1."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def next_rollouts(log: LogFile[StoredRollout], after: int, step: int | None, page_size: int) -> list[StoredRollout]:
    """Return the next rollouts after a number, in order, of one step or of all. Raises OSError."""
    with log.opened(after) as reader:
        return _page((row for _, row in reader.rows() if step in {None, row.step}), page_size)


def newest_rollouts(log: LogFile[StoredRollout], before: int, step: int | None, page_size: int) -> list[StoredRollout]:
    """Return the newest rollouts before a number (0: all), newest first, of one step or of all. Raises OSError."""
    with log.opened() as reader:
        places = array("Q")
        for offset, row in reader.rows():
            if before and row.number >= before:
                break
            if step in {None, row.step}:
                places.append(offset)
        return _page(map(reader.row_at, reversed(places)), page_size)


def _page(rows: Iterable[StoredRollout], page_size: int) -> list[StoredRollout]:
    found: list[StoredRollout] = []
    size = 0
    for row in islice(rows, min(page_size, _MOST_ROLLOUTS) or _ROLLOUTS):
        found.append(row)
        size += _size_of(row)
        if size >= _PAGE_BYTES:
            break
    return found


def _with_values(row: StoredRow, names: Collection[str]) -> StoredRow | None:
    """Return a row with only the named values, all without names; None if it has none of them."""
    if not names:
        return row
    values = {name: value for name, value in row.values.items() if name in names}
    return msgspec.structs.replace(row, values=values) if values else None


def _size_of(row: StoredRow | StoredRollout) -> int:
    """Return about the bytes of a row as a message."""
    if isinstance(row, StoredRow):
        return 64 + sum(len(name) + 16 for name in row.values)
    texts = (row.prompt, row.completion, *row.extras, *row.extras.values())
    return 64 + sum(len(text.encode()) for text in texts)
