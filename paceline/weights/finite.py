"""Whether weights are numbers: NaN and infinity make every answer of a model one token, without a word."""

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
"""Bits of the exponent: all are set in NaN and infinity, and in nothing else."""
_PIECE = 1 << 17
"""Elements that are looked at together: they stay in the processor's cache."""


def check_finite(weights: Path) -> None:
    """Refuse a safetensors file in which a tensor holds NaN or infinity.

    Raises NonFinite, naming the first, and as `read_tensor_entries`.
    """
    for run in _runs(read_tensor_entries(weights)):
        if not _is_finite(weights, run):
            name = next(entry.name for entry in run if not _is_finite(weights, [entry]))
            raise NonFinite("holds NaN or infinity; train again from a state before that", field=name)


def _runs(entries: Sequence[pb.TensorEntry]) -> Iterator[list[pb.TensorEntry]]:
    """Yield tensors of one dtype that lie one after the other: there are hundreds, and small ones."""
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
                return True  # It became shorter, which its checksum tells.
            np.bitwise_and(bits, exponent, out=bits)
            if bits.max() == exponent:
                return False
            count -= bits.size
    return True
