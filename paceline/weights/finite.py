"""Check weights for NaN and infinity, which silently reduce every answer of a model to one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import NonFinite
from paceline.types.v1 import tensor_pb2
from paceline.weights.manifest import read_tensor_entries
from paceline.weights.v1 import weight_service_pb2 as pb

_EXPONENTS: Mapping[int, np.unsignedinteger[Any]] = {
    tensor_pb2.DTYPE_FLOAT32: np.uint32(0x7F800000),
    tensor_pb2.DTYPE_BFLOAT16: np.uint16(0x7F80),
    tensor_pb2.DTYPE_FLOAT16: np.uint16(0x7C00),
}
"""Exponent bits by dtype: all are set in NaN and infinity, and in no other value."""
_PIECE = 1 << 17
"""Elements that are checked together, few enough to stay in the processor's cache."""


def check_finite(weights: Path) -> None:
    """Refuse a safetensors file in which a tensor holds NaN or infinity.

    Raises NonFinite that names the first such tensor, and the errors of `read_tensor_entries`.
    """
    for run in _runs(read_tensor_entries(weights)):
        if not _is_finite(weights, run):
            name = next(entry.name for entry in run if not _is_finite(weights, [entry]))
            raise NonFinite("holds NaN or infinity; train again from a state before that", field=name)


def _runs(entries: Sequence[pb.TensorEntry]) -> Iterator[list[pb.TensorEntry]]:
    """Yield groups of consecutive tensors of one dtype, because a file has hundreds of tensors, some of them small."""
    for _, run in groupby(entries, key=lambda entry: entry.dtype):
        yield list(run)


def _is_finite(weights: Path, run: Sequence[pb.TensorEntry]) -> bool:
    exponent = _EXPONENTS[run[0].dtype]
    count = sum(entry.size for entry in run) // exponent.itemsize
    with weights.open("rb", buffering=0) as file:
        file.seek(run[0].offset)
        while count:
            bits = np.fromfile(file, exponent.dtype, min(count, _PIECE))
            if not bits.size:
                return True  # The file was truncated meanwhile, which its checksum detects.
            np.bitwise_and(bits, exponent, out=bits)
            if bits.max() == exponent:
                return False
            count -= bits.size
    return True
