"""Bodies that callers send: bounded before anything parses them, and decoded away from the event loop if large.

A parser of JSON makes an object of every few bytes, which takes memory and time many times those of the bytes, and it
does not let other threads run until it is done. So what costs is counted first, by a scan that runs at the speed of
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from paceline import errors

MAX_JSON_PARTS = 1 << 18
"""Most values, names and escaped characters of a JSON body: twice as many as a context of 128k tokens has."""
INLINE_BYTES = 1 << 16
"""Bodies up to this size are decoded at once: a thread would cost more."""
_SLICE_BYTES = 1 << 20
_NO_PARTS = bytes(set(range(256)) - set(b",:[]{}\\"))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
P = ParamSpec("P")
T = TypeVar("T")


async def decoded(size: int, decode: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what `decode` makes of a body of `size` bytes; a large one is decoded in a thread."""
    if size <= INLINE_BYTES:
        return decode(*arguments, **options)
    return await asyncio.to_thread(decode, *arguments, **options)


class JsonParts:
    """Counts the parts of a JSON body while it arrives, those that its strings seem to have included."""

    def __init__(self, most: int = MAX_JSON_PARTS) -> None:
        self._left = self._most = most

    def add(self, piece: bytes) -> None:
        """Count a piece of the body. Raises OutOfRange if there are too many parts."""
        for start in range(0, len(piece), _SLICE_BYTES):
            self._left -= len(piece[start : start + _SLICE_BYTES].translate(None, _NO_PARTS))
            if self._left < 0:
                message = f"has more than {self._most} values, names and escaped characters; send less at a time"
                raise errors.OutOfRange(message, field="body")


def check_parts(content: bytes) -> None:
    """Check the number of a JSON body's parts. Raises OutOfRange."""
    JsonParts().add(content)


def depth_of(content: bytes) -> int:
    """Return the largest number of brackets open at once, those in strings included. `check_parts` comes before."""
    depth = deepest = 0
    for bracket in content.translate(None, _NO_BRACKETS):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest
