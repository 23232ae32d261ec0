"""safetensors files, laid out before they are written: the header, and where each tensor's bytes go.

The bytes equal those that the safetensors library writes for the same tensors, without its copy in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

_ORDER = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64)
"""dtypes in safetensors' order; tensors of the last dtype come first, so that all are aligned."""
_NAMES = dict(zip(_ORDER, ("U8", "I8", "F16", "BF16", "I32", "F32", "I64"), strict=True))
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorFile:
    """The content of one file. The layout is computed once."""

    name: str
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    """dtype of floating-point tensors in the file; None means each tensor's own."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return a tensor's dtype in the file."""
        return tensor.dtype if self.dtype is None or not tensor.is_floating_point() else self.dtype

    @cached_property
    def ordered(self) -> list[tuple[str, Tensor]]:
        """The tensors in the order of their bytes in the file."""
        return sorted(self.tensors.items(), key=lambda item: (-_ORDER.index(self.dtype_of(item[1])), item[0]))

    @cached_property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.numel() * self.dtype_of(tensor).itemsize for tensor in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """The bytes before the tensors."""
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        end = 0
        for name, tensor in self.ordered:
            dtype = self.dtype_of(tensor)
            start, end = end, end + tensor.numel() * dtype.itemsize
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text
