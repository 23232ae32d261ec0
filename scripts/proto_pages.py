"""Describe the contracts in Markdown, a page for each package, from the comments in `proto/`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

_File, _Message, _Enum, _Service = FileDescriptorProto, DescriptorProto, EnumDescriptorProto, ServiceDescriptorProto
_MESSAGES = _File.MESSAGE_TYPE_FIELD_NUMBER
_ENUMS = _File.ENUM_TYPE_FIELD_NUMBER
_SERVICES = _File.SERVICE_FIELD_NUMBER

Place = tuple[int, ...]
"""Where a descriptor stands in its file, as SourceCodeInfo counts."""


def proto_pages(root: Path) -> dict[str, str]:
    """Return the pages of the contracts below `root`, by the name of their package ("trainer")."""
    found: dict[str, list[FileDescriptorProto]] = {}
    for file in _read(root / "proto").file:
        found.setdefault(file.package.split(".")[1], []).append(file)
    return {name: _page(name, contracts) for name, contracts in sorted(found.items())}


def _read(source: Path) -> FileDescriptorSet:
    with TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        contracts = sorted(str(path) for path in source.rglob("*.proto"))
        includes = [f"-I{source}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments = ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={target}", *contracts]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc refuses the contracts, for the reason above")
        return FileDescriptorSet.FromString(target.read_bytes())


def _page(name: str, contracts: Sequence[FileDescriptorProto]) -> str:
    services = [service.name for file in contracts for service in file.service]
    parts = [f"# {services[0] if services else name.capitalize()}"]
    for file in contracts:
        comments = _comments(file)
        parts += [f"`proto/{file.name}`"]
        for index, service in enumerate(file.service):
            parts += _service(service, (_SERVICES, index), comments)
        for index, message in enumerate(file.message_type):
            parts += _message(message, "", (_MESSAGES, index), comments)
        for index, enum in enumerate(file.enum_type):
            parts += _enum(enum, "", (_ENUMS, index), comments)
    return "\n\n".join(part for part in parts if part) + "\n"


def _comments(file: FileDescriptorProto) -> Mapping[Place, str]:
    return {tuple(one.path): one.leading_comments or one.trailing_comments for one in file.source_code_info.location}


def _service(service: ServiceDescriptorProto, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    yield _text(comments.get(place, ""))
    for index, method in enumerate(service.method):
        asked, answer = ("stream " * streams + _short(name) for streams, name in (
            (method.client_streaming, method.input_type), (method.server_streaming, method.output_type)
        ))  # fmt: skip
        yield f"## {method.name}"
        yield f"`{method.name}({asked}) returns ({answer})`"
        yield _text(comments.get((*place, _Service.METHOD_FIELD_NUMBER, index), ""))


def _message(message: DescriptorProto, outer: str, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = outer + message.name
    yield f"## {name}"
    yield _text(comments.get(place, ""))
    entries = {one.name: one for one in message.nested_type if one.options.map_entry}
    rows = [
        f"| `{field.name}` | {_type(field, entries)} | "
        f"{_cell(comments.get((*place, _Message.FIELD_FIELD_NUMBER, index), ''))} |"
        for index, field in enumerate(message.field)
    ]
    yield "\n".join(["| field | type | |", "|---|---|---|", *rows]) if rows else ""
    for index, inner in enumerate(message.nested_type):
        yield from _message(inner, f"{name}.", (*place, _Message.NESTED_TYPE_FIELD_NUMBER, index), comments)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.", (*place, _Message.ENUM_TYPE_FIELD_NUMBER, index), comments)


def _enum(enum: EnumDescriptorProto, outer: str, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    yield f"## {outer}{enum.name}"
    yield _text(comments.get(place, ""))
    rows = [
        f"| `{value.name}` | {value.number} | {_cell(comments.get((*place, _Enum.VALUE_FIELD_NUMBER, index), ''))} |"
        for index, value in enumerate(enum.value)
    ]
    yield "\n".join(["| value | number | |", "|---|---|---|", *rows])


def _type(field: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    if entry := entries.get(field.type_name.rpartition(".")[2]):
        key, value = entry.field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    name = _short(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(type_name: str) -> str:
    """Return a type's name as readers of its package write it."""
    return re.sub(r"^\.(?:paceline\.\w+\.v1\.)?", "", type_name)


def _text(comment: str) -> str:
    """Return a comment as Markdown: what is not code stands for itself."""
    lines = (line.removeprefix(" ") for line in comment.rstrip().splitlines())
    pieces = re.split(r"(`[^`]*`)", "\n".join(lines))
    return "".join(one if one.startswith("`") else re.sub(r"([\[\]<>*_|])", r"\\\1", one) for one in pieces)


def _cell(comment: str) -> str:
    return " ".join(_text(comment).split()).replace("`|`", "`\\|`")
