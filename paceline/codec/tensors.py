"""Encode and decode tensors: little-endian bytes with dtype and shape."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import numpy as np

from paceline import errors
from paceline.types.training import Array
from paceline.types.v1 import tensor_pb2 as pb

FLOATS: frozenset[str] = frozenset({"float32"})
INTEGERS: frozenset[str] = frozenset({"int32", "int64"})
MASKS: frozenset[str] = frozenset({"uint8"})

_TO_WIRE: dict[str, pb.Dtype.ValueType] = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
    "float16": pb.DTYPE_FLOAT16,
    "uint8": pb.DTYPE_UINT8,
}
_FROM_WIRE: dict[int, str] = {wire: name for name, wire in _TO_WIRE.items()}


def tensor_to_proto(array: Array, field: str = "") -> pb.Tensor:
    """Encode an array of any shape; `field` is its place in the request, for errors.

    Raises InvalidDtype for a dtype that the wire format does not have.
    """
    wire = _TO_WIRE.get(array.dtype.name)
    if wire is None:
        raise errors.InvalidDtype(
            f"dtype {array.dtype.name} cannot be sent; use one of {', '.join(sorted(_TO_WIRE))}", field=field
        )
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return pb.Tensor(dtype=wire, shape=array.shape, data=little.tobytes())


def tensor_from_proto(tensor: pb.Tensor, field: str, dtypes: Collection[str], *, ndim: int | range = 1) -> Array:
    """Decode a tensor without copying; the array is read-only. `ndim` is its number of dimensions, or their range.

    Raises InvalidDtype if its dtype is not among `dtypes`, InvalidShape if its shape is not allowed or does not match
    its bytes.
    """
    name = _FROM_WIRE.get(tensor.dtype)
    if name is None or name not in dtypes:
        raise errors.InvalidDtype(
            f"is {name or 'unspecified'}; send {' or '.join(sorted(dtypes))}", field=f"{field}.dtype"
        )
    shape = tuple(tensor.shape)
    allowed = range(ndim, ndim + 1) if isinstance(ndim, int) else ndim
    if len(shape) not in allowed or any(extent < 0 for extent in shape):
        wanted = " or ".join(map(str, allowed))
        raise errors.InvalidShape(
            f"is {list(shape)}; send {wanted} dimension(s), none negative", field=f"{field}.shape"
        )
    dtype = np.dtype(name).newbyteorder("<")
    data = tensor.data
    if prod(shape) * dtype.itemsize != len(data):
        raise errors.InvalidShape(
            f"holds {len(data)} bytes; shape {list(shape)} of {name} needs {prod(shape) * dtype.itemsize}",
            field=f"{field}.data",
        )
    return np.frombuffer(data, dtype).reshape(shape)


def token_ids_from_proto(tensor: pb.Tensor, field: str) -> Array:
    """Decode token ids, int32 or int64, shape [N], N >= 1. Raises EmptyBatch if there are none."""
    tokens = tensor_from_proto(tensor, field, INTEGERS)
    if tokens.size == 0:
        raise errors.EmptyBatch("holds no token; send at least one", field=field)
    return tokens
