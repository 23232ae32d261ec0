"""Make messages from callers' values; a value that does not fit its field is refused by the field's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline import errors
from paceline.types.training import is_iterable

P = ParamSpec("P")
M = TypeVar("M", bound=Message)

_REFUSALS = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a value that its field cannot hold; the text does not name the field."""

_DICT = "a dict"
_WANTED = {
    FieldDescriptor.CPPTYPE_STRING: "a string",
    FieldDescriptor.CPPTYPE_BOOL: "a bool",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: "an integer",
    FieldDescriptor.CPPTYPE_INT64: "an integer",
    FieldDescriptor.CPPTYPE_UINT32: "an integer",
    FieldDescriptor.CPPTYPE_UINT64: "an integer",
}
_MOST = {FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1, FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1}
"""The largest numbers of the unsigned types."""


def make(cls: Callable[P, M], prefix: str = "", /, *args: P.args, **fields: P.kwargs) -> M:
    """Return a message of class `cls` with these fields; `prefix` comes before the names of fields in errors.

    Raises OutOfRange for a number outside its field's range, InvalidArgument for anything else that does not fit.
    """
    for name, value in fields.items():
        if isinstance(value, Iterator):  # can be read once, and a refusal reads it again
            fields[name] = list(value)
    try:
        return cls(*args, **fields)
    except _REFUSALS:
        for name, value in fields.items():
            _check(cast("type[Message]", cls), name, value, prefix)
        raise


def _check(cls: type[Message], name: str, value: Any, prefix: str = "") -> None:
    """Raise what `make` raises if this field cannot hold this value."""
    field = cast("FieldDescriptor | None", cls.DESCRIPTOR.fields_by_name.get(name))
    if field is None:  # stubs of an older contract: protobuf's own error says so
        return
    for part, argument, part_value, wanted in _parts(field, value):
        try:
            cls(**{name: argument})
        except _REFUSALS as problem:
            where = f"{prefix}{name}{part}"
            if isinstance(problem, TypeError) or wanted == _DICT:
                raise errors.InvalidArgument.of_type(part_value, wanted, where) from problem
            if isinstance(part_value, Integral):
                raise errors.OutOfRange(_out_of_range(field, int(part_value), wanted), field=where) from problem
            raise errors.InvalidArgument(f"cannot be sent: {problem}; give {wanted}", field=where) from problem


def _out_of_range(field: FieldDescriptor, number: int, wanted: str) -> str:
    """Say what is wrong with a number. The service may require more than its message, for instance 1 or more."""
    most = _MOST.get(field.cpp_type)
    if most is None:
        return f"is out of range; give {wanted}"
    return "must not be negative" if number < 0 else f"is too large; give at most {most}"


def _parts(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the parts of a field's value: its index in the field, an argument of this part alone, it, what is wanted.

    A part is an element of a list, a key or a value of a dict, and anything else as a whole.
    """
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        if not isinstance(value, Mapping):
            yield "", value, value, _DICT
            return
        for key, each in value.items():
            if isinstance(key, str):
                yield f"[{key}]", {key: each}, each, _wanted(kind.fields_by_name["value"])
            else:
                yield ".key", {key: each}, key, "a string"
    elif field.is_repeated and is_iterable(value):
        for index, each in enumerate(value):
            yield f"[{index}]", [each], each, _wanted(field)
    else:
        yield "", value, value, "a list" if field.is_repeated else _wanted(field)


def _wanted(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    return f"a {kind.name}" if kind else _WANTED[field.cpp_type]
