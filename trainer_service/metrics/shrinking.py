"""Which lines a file that has become too long keeps. The newest line always stays, since numbers continue from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a file, oldest first: their sizes in bytes, their steps, and whether the trainer wrote them."""

    sizes: Sequence[int]
    steps: Sequence[int]
    of_trainer: Sequence[int]


Shrink = Callable[[Lines, int], bytearray]
"""Returns for each line whether it is kept (1 or 0), so that they have at most so many bytes."""


def thin(lines: Lines, most: int) -> bytearray:
    """Drop every second step from the trainer's rows of the older half.

    If too much is left, also from the clients' rows; if still too much is left, drop the oldest rows.
    """
    half = _reaching(lines.sizes, sum(lines.sizes) // 2)
    odd, keep = _odd_steps(lines.steps[:half]), bytearray(b"\1") * len(lines.sizes)
    for is_dropped in (lines.of_trainer.__getitem__, lambda _: True):
        for index in range(half):
            if odd[index] and is_dropped(index):
                keep[index] = 0
        if _size(lines, keep) <= most:
            return keep
    return _drop_oldest(lines, keep, most)


def drop_oldest(lines: Lines, most: int) -> bytearray:
    """Drop the oldest lines."""
    return _drop_oldest(lines, bytearray(b"\1") * len(lines.sizes), most)


def _drop_oldest(lines: Lines, keep: bytearray, most: int) -> bytearray:
    left = _size(lines, keep)
    for index in range(len(keep) - 1):
        if left <= most:
            break
        if keep[index]:
            keep[index] = 0
            left -= lines.sizes[index]
    return keep


def _odd_steps(steps: Sequence[int]) -> list[int]:
    """Return for each line whether its step is the second, fourth, ... of the lines, where equal neighbours are one."""
    changes = [0, *(steps[index] != steps[index - 1] for index in range(1, len(steps)))]
    return [number % 2 for number in accumulate(changes)]


def _reaching(sizes: Sequence[int], most: int) -> int:
    """Return how many lines from the first on have at most so many bytes."""
    return next((index for index, total in enumerate(accumulate(sizes)) if total > most), len(sizes))


def _size(lines: Lines, keep: bytearray) -> int:
    return sum(size for size, is_kept in zip(lines.sizes, keep, strict=True) if is_kept)
