"""Element-wise work on a CPU, a few rows at a time, so that what passes between its steps stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = 1 << 17
"""Elements of a block: half a megabyte in float32, and a few such fit a core's second-level cache."""


def row_blocks(*tensors: Tensor, dim: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of the same length in `dim` into views of a block of rows each; on a GPU there is one block."""
    length = tensors[0].shape[dim]
    if tensors[0].device.type != "cpu" or not length:
        yield tensors
        return
    width = max(tensor.numel() for tensor in tensors) // length
    rows = max(1, _ELEMENTS // max(1, width))
    yield from zip(*(torch.split(tensor, rows, dim) for tensor in tensors), strict=True)
