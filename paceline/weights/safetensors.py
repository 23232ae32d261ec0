"""Safetensors files: the tensors that their headers describe, and a check for NaN and infinity."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from paceline import errors
from paceline.files.regular_files import open_raw
from paceline.types.v1 import tensor_pb2
from paceline.weights.v1 import weight_service_pb2 as pb

EXPONENTS: Mapping[int, np.unsignedinteger[Any]] = {
    tensor_pb2.DTYPE_FLOAT32: np.uint32(0x7F800000),
    tensor_pb2.DTYPE_BFLOAT16: np.uint16(0x7F80),
    tensor_pb2.DTYPE_FLOAT16: np.uint16(0x7C00),
}
"""Exponent bits by dtype: all are set in NaN and infinity, and in no other value. They are as wide as an element."""
MAX_HEADER_BYTES = 32 << 20
"""Longest header that is read; parsed, it takes tens of times as much memory."""
MAX_TENSORS = 1 << 18
"""Most tensors in a file. An adapter on every expert of a model of 60 layers with 384 each has half as many."""
_OFFSETS = b'"data_offsets"'
_PIECE = 1 << 17
"""Elements that are checked together, few enough to stay in the processor's cache."""
_COPIED = 1 << 24
"""Bytes that are copied together."""


def read_header(weights: Path) -> bytes:
    """Return the JSON header of a safetensors file, which is equal for files of one layout, such as a run's versions.

    Raises ChecksumMismatch if the file ends before the header does, InvalidShape if it has more than MAX_TENSORS.
    """
    with open_raw(weights) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            message = (
                f"is not a safetensors file, or has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
            )
            raise errors.ChecksumMismatch(message, field=weights.name)
        header = file.read(length)
    if not header or len(header) != length:
        raise errors.ChecksumMismatch("is not a safetensors file", field=weights.name)
    check_count(header.count(_OFFSETS), weights.name)
    return header


def check_count(tensors: int, field: str) -> None:
    """Check the number of tensors of a file. Raises InvalidShape."""
    if tensors > MAX_TENSORS:
        message = f"has {tensors} tensors; at most {MAX_TENSORS} are read: save fewer modules"
        raise errors.InvalidShape(message, field=field)


def read_tensor_entries(weights: Path) -> list[pb.TensorEntry]:
    """Return the tensors of a safetensors file and their positions.

    Raises ChecksumMismatch unless they tile the file exactly, InvalidShape if a tensor's size does not match its shape
    and dtype, InvalidDtype.
    """
    from paceline.weights.safetensors_header import parse_header  # noqa: PLC0415 - clients, which read none, lack msgspec

    header = read_header(weights)
    try:
        entries = parse_header(header)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise errors.ChecksumMismatch("is not a safetensors file", field=weights.name) from error
    ends = [8 + len(header), *(entry.offset + entry.size for entry in entries)]
    if [entry.offset for entry in entries] != ends[:-1] or ends[-1] != weights.lstat().st_size:
        raise errors.ChecksumMismatch("tensors do not tile the file; it is damaged", field=weights.name)
    return list(entries)


def copy_tensors(source: Path, target: Path, names: Collection[str]) -> None:
    """Copy some tensors of a safetensors file, by name, into a new one. Raises as `read_tensor_entries`."""
    kept = [entry for entry in read_tensor_entries(source) if entry.name in names]
    given, header, at = json.loads(read_header(source)), dict[str, Any](), 0
    for entry in kept:
        header[entry.name] = given[entry.name] | {"data_offsets": [at, at + entry.size]}
        at += entry.size
    text = json.dumps({name: given[name] for name in ("__metadata__",) if name in given} | header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors
    with source.open("rb") as file, target.open("wb") as copy:
        copy.write(len(text).to_bytes(8, "little") + text)
        for entry in kept:
            file.seek(entry.offset)
            for start in range(0, entry.size, _COPIED):
                copy.write(file.read(min(_COPIED, entry.size - start)))


def check_finite(weights: Path) -> None:
    """Refuse a safetensors file in which a tensor holds NaN or infinity.

    Raises NonFinite that names the first such tensor, and the errors of `read_tensor_entries`.
    """
    # Consecutive tensors of one dtype are read together, because a file has hundreds of tensors, some of them small.
    for _, group in groupby(read_tensor_entries(weights), key=lambda entry: entry.dtype):
        run = list(group)
        if not _is_finite(weights, run):
            name = next(entry.name for entry in run if not _is_finite(weights, [entry]))
            raise errors.NonFinite("holds NaN or infinity; train again from a state before that", field=name)


def _is_finite(weights: Path, run: Sequence[pb.TensorEntry]) -> bool:
    exponent = EXPONENTS[run[0].dtype]
    count = sum(entry.size for entry in run) // exponent.itemsize
    with open_raw(weights) as file:
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
