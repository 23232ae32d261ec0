"""Check requests against the bounds in their contract (`paceline.types.v1.bounds`) before they are decoded.

    bytes ── check_size ── check_wire ── parsed ── check_message ── the service's own validation

A test fails for a field without a bound, so that none can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from math import isfinite
from typing import Any, cast

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from paceline import errors
from paceline.codec.commands import ORDER_FIELDS
from paceline.spans import span
from paceline.types.v1 import bounds_pb2 as pb

MAX_KEY_BYTES = 128
"""Most bytes of a map key."""

_MAX_PARTS = 131_072
"""Most fields of a request, including those of nested messages: each takes memory many times its bytes."""
_UNKNOWN_PARTS = 64
"""Additional fields allowed in one message, for a newer client."""
_SCAN_BYTES = 1 << 16
"""Messages up to this size are parsed without a scan; they cannot hold enough fields to matter."""
_UNKNOWN_BYTES = 4096
"""Additional bytes allowed in one message, for a newer client's fields."""
_NUMBER_BYTES, _HEAD_BYTES = 10, 8
"""Bytes of the longest number on the wire, and of the longest tag with a length."""

_FOREIGN = pb.Bounds(max_bytes=4096, max_items=64, min=-(2.0**63), max=2.0**63)
_CONVERTED = pb.Bounds(max_items=_MAX_PARTS)
"""Bounds of Tinker's messages, whose values are checked once they are converted to requests of Paceline."""

_Check = Callable[[Any], None]


@lru_cache(1024)  # bounded, because callers choose the names
def request_of(method: str) -> Descriptor | None:
    """Return the request type of /package.Service/Method, or None if no contract in this process has the method."""
    service, _, name = method.removeprefix("/").partition("/")
    try:
        methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    except KeyError:
        return None
    return methods[name].input_type if name in methods else None


@cache
def largest(message: Descriptor) -> int:
    """Return the most bytes of a message whose fields keep their bounds, plus an allowance for unknown fields."""
    return _UNKNOWN_BYTES + sum(map(_largest_field, message.fields))


def parse_request(data: bytes, contract: Descriptor | None, decode: Callable[[bytes], Any] | None) -> Any:
    """Check and parse a request; without `decode` its bytes are returned. `contract` is None for an unknown method.

    What a run's command asks for is not checked here, only its place in the run's order: the service does the rest,
    because a refused command keeps that place. Raises MessageTooLarge, UnreadableMessage, OutOfRange, NonFinite or
    InvalidArgument.
    """
    if contract is not None:
        check_size(len(data), contract)
    if decode is None:
        return data
    if contract is not None:
        check_wire(data, contract)
    try:
        request = decode(data)
    except DecodeError as error:
        raise errors.UnreadableMessage("the message cannot be parsed; compare it with the contract") from error
    if isinstance(request, Message):
        _check_fields(request, _asked(request.DESCRIPTOR))
    return request


@cache
def _asked(message: Descriptor) -> frozenset[int]:
    """Return the fields that say what a command asks for, without those that say where; none if it is no command."""
    if not set(message.fields_by_name) >= set(ORDER_FIELDS):
        return frozenset()
    inner = message.oneofs_by_name.get("command")  # of Execute, whose other fields belong to the call
    asked = inner.fields if inner else [field for field in message.fields if field.name not in ORDER_FIELDS]
    return frozenset(field.number for field in asked)


def bounds_of(field: FieldDescriptor) -> pb.Bounds:
    """Return a field's bounds; empty ones if the contract sets none.

    Messages of other packages, such as reflection's, have no bounds of their own, so all of their fields share one.
    """
    message = cast("Descriptor", field.containing_type)
    if not message.full_name.startswith("paceline."):
        return _FOREIGN
    if message.full_name.startswith("paceline.tinker."):
        return _CONVERTED
    bounds: pb.Bounds = field.GetOptions().Extensions[pb.bounds]
    return bounds


def check_size(size: int, message: Descriptor) -> None:
    """Check the length of a message. Raises MessageTooLarge."""
    if size > largest(message):
        raise errors.MessageTooLarge(f"has {size} bytes; a {message.name} may have at most {largest(message)}")


def check_wire(data: bytes, message: Descriptor) -> None:
    """Count the fields of a message, including nested ones, without parsing. Raises OutOfRange, UnreadableMessage."""
    if len(data) <= _SCAN_BYTES:
        return
    try:
        _scan(data, 0, len(data), message, _MAX_PARTS)
    except IndexError as error:
        raise errors.UnreadableMessage("the message ends too early") from error


def check_message(message: Message) -> None:
    """Check every field that is set. Raises OutOfRange, NonFinite or InvalidArgument that names the field."""
    _check_fields(message, frozenset())


def _check_fields(message: Message, unchecked: frozenset[int]) -> None:
    checks = _checks(message.DESCRIPTOR)
    for field, value in message.ListFields():
        if field.number in unchecked:
            continue
        try:
            checks[field.number](value)
        except errors.PacelineError as error:
            raise _within(error, field.name) from None


def _within(error: errors.PacelineError, name: str) -> errors.PacelineError:
    """Prefix an error's field with the name of what holds it."""
    separator = "." if error.field and not error.field.startswith("[") else ""
    error.field = f"{name}{separator}{error.field}"
    return error


@cache
def _checks(message: Descriptor) -> Mapping[int, _Check]:
    return {field.number: _check_of(field) for field in message.fields}


def _check_of(field: FieldDescriptor) -> _Check:
    if not field.is_repeated:
        return _check_value_of(field)
    most = bounds_of(field).max_items
    named = is_map(field)
    check = _check_value_of(_value_of(field), bounds_of(field))

    def check_elements(elements: Any) -> None:
        if len(elements) > most:
            raise errors.OutOfRange(f"has {len(elements)} elements; at most {most} are accepted")
        for name, element in elements.items() if named else enumerate(elements):
            if isinstance(name, str) and len(name.encode()) > MAX_KEY_BYTES:
                raise errors.OutOfRange(f"has a name of {len(name.encode())} bytes; at most {MAX_KEY_BYTES}")
            try:
                check(element)
            except errors.PacelineError as error:
                raise _within(error, f"[{name}]") from None

    return check_elements


def _check_value_of(field: FieldDescriptor, bounds: pb.Bounds | None = None) -> _Check:
    limits = bounds or bounds_of(field)
    if field.message_type is not None:
        # protobuf's own messages, such as timestamps, have no bound other than their length.
        return check_message if field.message_type.full_name.startswith("paceline.") else lambda value: None
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return lambda value: None
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return _check_enum_of(field)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _check_bytes_of(limits.max_bytes, text=field.type == FieldDescriptor.TYPE_STRING)
    return _check_number_of(limits.min, limits.max, non_finite=limits.non_finite)


def _check_enum_of(field: FieldDescriptor) -> _Check:
    known = cast("EnumDescriptor", field.enum_type).values_by_number
    names = ", ".join(value.name for number, value in known.items() if number)

    def check(value: int) -> None:
        if value not in known:
            raise errors.InvalidArgument(f"is {value}; send one of {names}")

    return check


def _check_bytes_of(most: int, *, text: bool) -> _Check:
    def check(value: str | bytes) -> None:
        size = len(value.encode()) if text and isinstance(value, str) else len(value)
        if size > most:
            raise errors.OutOfRange(f"has {size} bytes; at most {most} are accepted")

    return check


def _check_number_of(low: float, high: float, *, non_finite: bool) -> _Check:
    def check(value: float) -> None:
        if not isfinite(value):
            if non_finite:
                return
            raise errors.NonFinite("must be a finite number")
        if not low <= value <= high:
            raise errors.OutOfRange(f"is {value:g}; it must be {span(f'{low:g}', f'{high:g}')}")

    return check


def _largest_field(field: FieldDescriptor) -> int:
    limits = bounds_of(field)
    if is_map(field):
        value = _largest_value(_value_of(field), limits)
        return limits.max_items * (2 * _HEAD_BYTES + MAX_KEY_BYTES + value)
    return (limits.max_items if field.is_repeated else 1) * _largest_value(field, limits)


def _largest_value(field: FieldDescriptor, limits: pb.Bounds) -> int:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _HEAD_BYTES + largest(field.message_type)
    return _HEAD_BYTES + (limits.max_bytes if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else _NUMBER_BYTES)


def _value_of(field: FieldDescriptor) -> FieldDescriptor:
    """Return the field of a map's values, or the field itself if it is not a map."""
    return cast("Descriptor", field.message_type).fields_by_name["value"] if is_map(field) else field


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


@cache
def _parts_of(message: Descriptor) -> tuple[int, Mapping[int, Descriptor]]:
    """Return the most fields that a message may have on the wire, and the types of those that are messages."""
    within = {field.number: field.message_type for field in message.fields if field.message_type is not None}
    return _UNKNOWN_PARTS + sum(bounds_of(field).max_items + 2 for field in message.fields), within


def _scan(data: bytes, at: int, end: int, message: Descriptor, left: int) -> int:
    """Count the fields between two positions, including nested ones, and return how many more are allowed.

    It avoids function calls, because it is a Python loop over bytes (https://protobuf.dev/programming-guides/encoding/).
    """
    most, within = _parts_of(message)
    stop = max(left - most, 0)
    while at < end:
        if left == stop:
            raise errors.OutOfRange(f"a {message.name} has too many fields; split the request")
        left -= 1
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == 2:
            size = data[at]
            at += 1
            if size > 0x7F:
                size, at = _varint(data, at - 1)
            if at + size > end:
                raise errors.UnreadableMessage("a field ends after its message")
            if (inner := within.get(tag >> 3)) is not None and size:
                before = left
                left = _scan(data, at, at + size, inner, left)
                stop = max(stop - (before - left), 0)
            at += size
        elif kind == 0:
            while data[at] > 0x7F:
                at += 1
            at += 1
        elif kind in {1, 5}:
            at += 8 if kind == 1 else 4
        else:
            raise errors.UnreadableMessage("the message has a group; compare it with the contract")
    return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise errors.UnreadableMessage("a number is longer than ten bytes")
