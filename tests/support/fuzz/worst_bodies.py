"""The worst small bodies: as much work, or as much memory, as a parser can make of a few hundred kilobytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor

_SPARE = 1000
"""Parts of a body that are left to what is around the list of parts."""
_TEXT_BYTES = 4 << 20


def _numbered(piece: bytes, count: int) -> bytes:
    return b",".join([piece] * count)


def worst_json(most: int) -> Iterator[bytes]:
    """Yield values in JSON, most of which have almost `most` parts."""
    few = most - _SPARE
    yield from (
        b"[" + _numbered(b"1", few) + b"]",  # numbers
        b"[" + _numbered(b"1.25", few) + b"]",  # floats
        b"[" + _numbered(b"1e400", few) + b"]",  # numbers out of range
        b"[" + _numbered(b'"x"', few // 3) + b"]",  # texts
        b"[" + _numbered(b"{}", few // 3) + b"]",  # objects
        b"[" + _numbered(b"[]", few // 3) + b"]",  # lists
        b"[" + _numbered(b'{"a":1}', few // 6) + b"]",  # filled objects
        b"{" + b",".join(b'"a%d":1' % number for number in range(few // 4)) + b"}",  # names
        b"{" + _numbered(b'"a":1', few // 4) + b"}",  # one name
        b"1," + b",".join(b'"a%d":1' % number for number in range(few // 4)),  # fields
        b"[" + _numbered(b"7" * 4000, _TEXT_BYTES // 4000) + b"]",  # long numbers
        b"[" + _numbered(b"7" * 640, _TEXT_BYTES // 640) + b"]",  # numbers that are just taken
        b"7" * _TEXT_BYTES,  # a number
        b"[" + _numbered(b"0." + b"7" * 4000, _TEXT_BYTES // 4000) + b"]",  # long fractions
        b'"' + b"\\u00e9" * few + b'"',  # escapes
        b'"' + b"a" * _TEXT_BYTES + b'"',  # a text
        b"[" * (few // 2) + b"]" * (few // 2),  # depth
        b'{"a":' * (few // 5) + b"1" + b"}" * (few // 5),  # depth of objects
        b"[" + _numbered(b"{}", _TEXT_BYTES // 3) + b"]",  # too many objects
    )


def _tag(number: int) -> bytes:
    return _varint(number << 3 | 2)


def _varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def worst_messages(message: Descriptor, valid: bytes) -> Iterator[bytes]:
    """Yield bodies of protobuf that begin as a valid one: each repeated or nested field many times, empty and full."""
    for field in message.fields:
        empty = _tag(field.number) + b"\0"
        if field.type in {field.TYPE_MESSAGE, field.TYPE_BYTES, field.TYPE_STRING}:
            yield valid + empty * 60_000
            yield valid + empty * 1_000_000
        if field.message_type is not None:
            for inner in field.message_type.fields:
                part = (_tag(inner.number) + b"\0") * 60_000
                yield valid + _tag(field.number) + _varint(len(part)) + part
    yield valid + b"\xf8\x7f\x01" * 1_000_000


def processor_seconds(pid: int) -> tuple[float, float]:
    """Return how long a service's first thread, which runs its event loop, and all its threads have computed."""
    used = {task.name: int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()}
    return used[str(pid)] / 1e9, sum(used.values()) / 1e9
