"""Versions as streams of checksummed chunks: FetchVersion replies as bytes, not copied through a message object.

Replies are written in the wire format of FetchVersionResponse, which generated stubs of any language can read. The
reader accepts whatever a servicer may send (https://protobuf.dev/programming-guides/encoding/). Over loopback this
transfers 3.0 times as many bytes a second as generated stubs (`make bench-stream`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import numpy as np
from google.protobuf.message import DecodeError

from paceline import errors
from paceline.files.regular_files import open_raw
from paceline.types import ModelRef
from paceline.weights.hashing import Blake3
from paceline.weights.v1 import weight_service_pb2 as pb

CHUNK_BYTES = 1 << 20
"""1 MiB: below the 4 MiB that any gRPC client accepts by default, and where loopback throughput peaks."""

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightService"]
_METHOD = "FetchVersion"
_CHUNK = 2 << 3 | 2
"""Tag of FetchVersionResponse.chunk: number, then wire type (0 a varint, 2 bytes with a length, 5 four bytes)."""
_OFFSET, _DATA, _CRC32C = 1 << 3 | 0, 2 << 3 | 2, 3 << 3 | 5
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk whose data is a view of the message that carried it."""

    offset: int
    data: memoryview
    """Keeps the message alive."""
    crc32c: int

    @classmethod
    def of(cls, chunk: pb.Chunk) -> Piece:
        """Convert the chunk of a message object."""
        return cls(chunk.offset, memoryview(chunk.data), chunk.crc32c)

    @property
    def is_intact(self) -> bool:
        """Whether the data matches the chunk's checksum."""
        return _crc32c(self.data) == self.crc32c


Part = pb.FetchVersionResponse | Piece
"""A reply that holds a manifest or a path, or a chunk."""
FetchVersion = Callable[[pb.FetchVersionRequest, Any], AsyncIterator[bytes]]


def absent(ref: ModelRef) -> errors.NotFound:
    """Return the error for weights that do not exist, with which trainer and samplers answer alike."""
    if ref.checkpoint:
        return errors.CheckpointNotFound.of(ref.checkpoint, "model.checkpoint")
    return errors.VersionNotFound.of(f"no such version of {ref.run_id}, or no longer kept", "model.version.version")


def write_piece(file: FileIO, offset: int, size: int) -> bytes:
    """Return the reply that carries a file's next `size` bytes, which start at `offset`.

    They are read into a buffer that becomes the reply without a copy. Raises EOFError if there are fewer.
    """
    head = b"".join((bytes((_OFFSET,)), _varint(offset), bytes((_DATA,)), _varint(size)))
    head = b"".join((bytes((_CHUNK,)), _varint(len(head) + size + 1 + _CRC_BYTES), head))
    reply, end = BytesIO(), len(head) + size
    reply.seek(end)
    reply.write(bytes((_CRC32C,)) + bytes(_CRC_BYTES))
    with reply.getbuffer() as view, view[len(head) : end] as data:
        view[: len(head)] = head
        if file.readinto(data) != size:
            raise EOFError("the file is shorter than it was")
        view[-_CRC_BYTES:] = _crc32c(data).to_bytes(_CRC_BYTES, "little")
    return reply.getvalue()


def read_replies(path: Path) -> Iterator[bytes]:
    """Open a file, and return an iterator of the FetchVersion replies that carry its chunks, in order of offset.

    The file may be removed as soon as this has returned.
    """
    return _read_replies(open_raw(path))


def _read_replies(file: FileIO) -> Iterator[bytes]:
    with file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, CHUNK_BYTES):
            yield write_piece(file, offset, min(CHUNK_BYTES, size - offset))


def read_part(message: bytes) -> Part:
    """Parse a reply, without copying the data of a chunk. Raises DecodeError if it cannot be parsed."""
    try:
        piece = _read_piece(message)
    except IndexError:  # truncated, which protobuf's own parser reports better
        piece = None
    if piece is not None:
        return piece
    reply = pb.FetchVersionResponse.FromString(message)
    return Piece.of(reply.chunk) if reply.WhichOneof("part") == "chunk" else reply


def add_fetch_version(server: grpc.aio.Server, method: FetchVersion) -> None:
    """Serve FetchVersion with a method that yields serialised replies, in place of the servicer's."""
    handler: Any = grpc.unary_stream_rpc_method_handler(
        method,
        request_deserializer=pb.FetchVersionRequest.FromString,
    )
    server.add_registered_method_handlers(_SERVICE.full_name, {_METHOD: handler})


def fetch_version(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamMultiCallable[pb.FetchVersionRequest, Part]:
    """Return the stub's FetchVersion, with `read_part` to parse replies."""
    return channel.unary_stream(
        f"/{_SERVICE.full_name}/{_METHOD}",
        request_serializer=pb.FetchVersionRequest.SerializeToString,
        response_deserializer=read_part,
    )


async def read_parts(call: grpc.aio.UnaryStreamCall[pb.FetchVersionRequest, Part]) -> AsyncIterator[Part]:
    """Yield a call's replies. Unlike the call's own iterator, keep no reply alive while the next one arrives."""
    parts = [await call.read()]
    while isinstance(parts[0], Part):
        yield parts.pop()  # type: ignore[misc] # the narrowing of parts[0] does not reach pop
        parts.append(await call.read())


class ChunkWriter:
    """Writes chunks to a file as they arrive, verifying each one and then the whole file."""

    def __init__(self, path: Path, manifest: pb.Manifest) -> None:
        self._file = path.open("xb")
        self._manifest = manifest
        self._blake3 = Blake3()
        self._offset = 0

    def write(self, chunk: Piece) -> None:
        """Append a chunk. Raises ChecksumMismatch if it is damaged, InvalidShape if it is not the next one."""
        data = chunk.data
        if chunk.offset != self._offset or self._offset + len(data) > self._manifest.total_size:
            raise errors.InvalidShape(
                f"is {chunk.offset} with {len(data)} bytes, after {self._offset} of {self._manifest.total_size}",
                field="chunk.offset",
            )
        if not chunk.is_intact:
            raise errors.ChecksumMismatch("was damaged in transfer; send it again", field="chunk.crc32c")
        self._file.write(data)
        self._blake3.update(data)
        self._offset += len(data)

    def finish(self) -> str:
        """Close the file and return its BLAKE3-256. Raises ChecksumMismatch if it differs from the manifest's."""
        self.close()
        blake3 = self._blake3.hexdigest()
        if self._offset != self._manifest.total_size or blake3 != self._manifest.model.blake3:
            raise errors.ChecksumMismatch("the received bytes differ from the manifest's; send them again")
        return blake3

    def close(self) -> None:
        """Close the file without verifying it."""
        self._file.close()


def _read_piece(message: bytes) -> Piece | None:
    """Parse a reply that is one chunk of known fields, in any order; return None for anything else."""
    if message[0] != _CHUNK:
        return None
    length, at = _read_varint(message, 1)
    if at + length != len(message):
        return None
    offset, crc32c, data = 0, 0, slice(0)
    while at < len(message):
        tag, at = message[at], at + 1
        if tag == _OFFSET:
            offset, at = _read_varint(message, at)
        elif tag == _DATA:
            size, at = _read_varint(message, at)
            data, at = slice(at, at + size), at + size
        elif tag == _CRC32C:
            crc32c, at = int.from_bytes(message[at : at + _CRC_BYTES], "little"), at + _CRC_BYTES
        else:
            return None
    if at != len(message):
        return None
    return Piece(offset, memoryview(message)[data], crc32c)


def _crc32c(data: memoryview) -> int:
    """Return the CRC-32C. google_crc32c accepts an array, which needs no copy, but no memoryview."""
    checksum: int = google_crc32c.value(np.frombuffer(data, np.uint8))
    return checksum


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it. Raises DecodeError, or IndexError at the end."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, at
    raise DecodeError("a varint is longer than ten bytes")
