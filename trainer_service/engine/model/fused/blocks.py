"""Element-wise work on rows: in small blocks, so that intermediate results stay in the cache, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 1 << 16
"""Elements of a block: a quarter of a megabyte in float32; several blocks fit into a core's second-level cache."""

Body = Callable[..., None]
"""A function of tensors' rows that writes its results into some of the tensors."""


class RowWork:
    """Runs the element-wise work of the fused layers.

    Without a torch.compile backend, each body runs eagerly, block by block. With one, such as "inductor", it is
    compiled into a loop over all rows at its first call for a dtype, which takes seconds.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._compiled: dict[Body, Body] = {}

    def __call__(self, body: Body, *tensors: Tensor, dim: int = 0, **constants: float) -> None:
        """Apply `body` to tensors of the same length in `dim`."""
        if self._backend is None:
            for part in row_blocks(*tensors, dim=dim):
                body(*part, **constants)
            return
        if body not in self._compiled:
            self._compiled[body] = torch.compile(body, dynamic=True, fullgraph=True, backend=self._backend)
        self._compiled[body](*tensors, **constants)


def row_blocks(*tensors: Tensor, dim: int = 0) -> Iterator[tuple[Any, ...]]:
    """Split tensors of the same length in `dim` into views of a block of rows each; on a GPU, into one block."""
    length = tensors[0].shape[dim]
    if tensors[0].device.type != "cpu" or not length:
        yield tensors
        return
    width = max(tensor.numel() for tensor in tensors) // length
    rows = max(1, _ELEMENTS // max(1, width))
    yield from zip(*(torch.split(tensor, rows, dim) for tensor in tensors), strict=True)
