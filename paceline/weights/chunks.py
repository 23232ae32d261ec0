"""A safetensors file as a stream of checksummed chunks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from paceline import errors
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.wire import Piece, write_piece

CHUNK_BYTES = 1 << 20
"""1 MiB: below the 4 MiB that any gRPC client accepts by default, and where loopback throughput peaks."""


def read_replies(path: Path) -> Iterator[bytes]:
    """Yield the FetchVersion replies that carry a file's chunks, in order of offset."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, CHUNK_BYTES):
            yield write_piece(file, offset, min(CHUNK_BYTES, size - offset))


class ChunkWriter:
    """Writes chunks to a file as they arrive, verifying each one and then the whole file."""

    def __init__(self, path: Path, manifest: pb.Manifest) -> None:
        self._file: BinaryIO = path.open("xb")
        self._manifest = manifest
        self._hash = hashlib.sha256()
        self._offset = 0

    def write(self, chunk: Piece) -> None:
        """Append a chunk. Raises ChecksumMismatch if it is damaged, InvalidShape if it is not the next one."""
        data = chunk.data
        if chunk.offset != self._offset or self._offset + len(data) > self._manifest.total_size:
            raise errors.InvalidShape(
                f"is {chunk.offset} with {len(data)} bytes; {self._offset} of {self._manifest.total_size} came so far",
                field="chunk.offset",
            )
        if not chunk.is_intact:
            raise errors.ChecksumMismatch("was damaged on its way; send it again", field="chunk.crc32c")
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)

    def finish(self) -> str:
        """Close the file and return its SHA-256. Raises ChecksumMismatch if it differs from the manifest's."""
        self.close()
        digest = self._hash.hexdigest()
        if self._offset != self._manifest.total_size or digest != self._manifest.model.sha256:
            raise errors.ChecksumMismatch("the bytes that came are not those of the manifest; send them again")
        return digest

    def close(self) -> None:
        """Close the file without verifying it."""
        self._file.close()
