"""Allocator settings of the engine process."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Reuse large freed blocks instead of returning them to the system.

    By default every large tensor gets a new mapping, and its pages are faulted in one by one, which takes longer than
    the arithmetic on them. Does nothing if the C library is not glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
