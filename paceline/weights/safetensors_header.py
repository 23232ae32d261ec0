"""Parses the headers of safetensors files, which may be hostile."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from operator import attrgetter

import msgspec

from paceline import errors
from paceline.types.v1 import tensor_pb2
from paceline.weights.safetensors import EXPONENTS, check_count
from paceline.weights.v1 import weight_service_pb2 as pb

_DTYPES = {
    "F32": tensor_pb2.DTYPE_FLOAT32,
    "BF16": tensor_pb2.DTYPE_BFLOAT16,
    "F16": tensor_pb2.DTYPE_FLOAT16,
}


class _TensorEntry(msgspec.Struct, frozen=True):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@lru_cache(maxsize=16)
def parse_header(text: bytes) -> tuple[pb.TensorEntry, ...]:
    """Return the tensors in order of offset. Cached: a run's versions share one header, read several times for each.

    Raises ValueError unless it is a header, InvalidDtype, InvalidShape.
    """
    base = 8 + len(text)
    header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    check_count(len(header), "weights")  # a key may be written with escapes
    return tuple(sorted((_entry(name, entry, base) for name, entry in header.items()), key=attrgetter("offset")))


def _entry(name: str, text: msgspec.Raw, base: int) -> pb.TensorEntry:
    entry = msgspec.json.decode(text, type=_TensorEntry)
    start, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise errors.InvalidDtype(f"has dtype {entry.dtype}; weights are F32, BF16 or F16", field=name)
    shape = entry.shape
    if any(extent <= 0 for extent in shape) or prod(shape) * EXPONENTS[dtype].itemsize != end - start:
        raise errors.InvalidShape(
            f"has shape {shape} of {entry.dtype}, and {end - start} bytes in the file", field=name
        )
    return pb.TensorEntry(name=name, dtype=dtype, shape=shape, offset=base + start, size=end - start)
