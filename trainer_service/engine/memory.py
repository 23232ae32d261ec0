"""Report running out of memory as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import OutOfMemory


@contextmanager
def out_of_memory_named() -> Iterator[None]:
    """Raise OutOfMemory for every error by which torch reports a failed allocation."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        raise OutOfMemory("the engine ran out of memory; send fewer or shorter sequences.") from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
