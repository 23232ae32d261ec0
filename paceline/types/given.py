"""What users give, made what is sent: lists, numpy arrays and tensors of torch become arrays, or are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidArgument, InvalidDtype, InvalidShape, OutOfRange

_REMEDY = "encode it with the model's tokenizer, `get_tokenizer().encode(text)`"


def as_array(values: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Make an array of numbers; one of numpy stays as it is, everything else becomes `dtype`.

    Raises InvalidDtype for text, for what holds no numbers and for fractions where integers are needed, InvalidShape
    for rows of different lengths, OutOfRange for integers that `dtype` does not hold.
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
    """Make a row of N >= 1 token ids. Raises what `as_array` does, InvalidShape, InvalidDtype."""
    array = as_array(values, dtype, field)
    if array.ndim != 1:
        raise InvalidShape(f"is {list(array.shape)}; give one dimension", field=field)
    if array.dtype.kind not in "iu":
        raise InvalidDtype(f"is {array.dtype.name}; give integers", field=field)
    return array


def as_names(values: Iterable[str], field: str) -> tuple[str, ...]:
    """Make a tuple of names. Raises InvalidArgument for a single one, whose letters would be taken for names."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"is one string; give a list of them, [{values!r}]", field=field)
    return tuple(values)


def _from_torch(values: Any) -> Any:
    """Return a tensor of torch as one that numpy reads: without gradient, on the CPU, and in no dtype numpy lacks."""
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
