"""Validate and convert user input: lists, numpy arrays and torch tensors become arrays, or are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidArgument, InvalidDtype, InvalidShape, OutOfRange

_REMEDY = "encode it with the model's tokenizer, `get_tokenizer().encode(text)`"


def as_array(values: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Convert numbers to an array: numpy arrays are returned unchanged, everything else is converted to `dtype`.

    Raises InvalidDtype for text, other non-numbers, and fractions where integers are required, InvalidShape for rows
    of different lengths, OutOfRange for integers that do not fit `dtype`.
    """
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, str | bytes):
        raise InvalidDtype(f"is text; give token ids or numbers: {_REMEDY}", field=field)
    try:
        array = np.asarray(_from_torch(values))
    except (TypeError, ValueError, OverflowError) as problem:
        raise InvalidShape(f"is no array of numbers: {problem}", field=field) from problem
    if array.dtype.kind not in "biuf":
        raise InvalidDtype(f"holds {_describe(array)}; give numbers", field=field)
    if dtype.kind in "iu" and array.size:
        _check_integers(array, dtype, field)
    return array.astype(dtype)


def as_tokens(values: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Convert to an array of token ids, shape [N]. Raises what `as_array` raises, InvalidShape, InvalidDtype."""
    array = as_array(values, dtype, field)
    if array.ndim != 1:
        raise InvalidShape(f"is {list(array.shape)}; give one dimension", field=field)
    if array.dtype.kind not in "iu":
        raise InvalidDtype(f"is {array.dtype.name}; give integers", field=field)
    return array


def as_names(values: Iterable[str], field: str) -> tuple[str, ...]:
    """Convert to a tuple of names. Raises InvalidArgument for a single string, whose letters would become names."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"is one string; give a list of them, [{values!r}]", field=field)
    return tuple(values)


def _from_torch(values: Any) -> Any:
    """Convert a torch tensor to numpy: detached, on the CPU, floats as float64 (numpy lacks bfloat16)."""
    if not all(hasattr(values, name) for name in ("detach", "cpu", "is_floating_point")):
        return values
    tensor = values.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _check_integers(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> None:
    limits = np.iinfo(dtype)
    if not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
        raise InvalidDtype(f"holds fractions, {_describe(array)}; give integers", field=field)
    if array.min() < limits.min or array.max() > limits.max:
        raise OutOfRange(f"holds {array.max()} or lower than {limits.min}; {dtype.name} does not", field=field)


def _describe(array: NDArray[Any]) -> str:
    return "text" if array.dtype.kind in "SU" else array.dtype.name
