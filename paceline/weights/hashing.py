"""Hashes of weights' files: BLAKE3-256, which names the content of a version, and the checksums beside it.

A file is read once, in pieces, for all of its checksums. Where there are cores to spare, threads divide each piece.
Only services hash weights: the Python client does not, and needs no blake3.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from paceline.files.regular_files import open_raw

_PIECE_BYTES = 1 << 18
"""256 KiB: stays in a core's cache between reading and hashing."""
_SHARED_PIECE_BYTES = 1 << 20
"""1 MiB: enough for each of several threads, and still in a cache."""
_MOST_THREADS = 8
"""More wait for memory."""

Sink = Callable[[memoryview], object]
"""Takes the next bytes of a file."""


def spare_threads() -> int:
    """Return how many threads may hash: half of this service's cores, because the other half computes, at most 8.

    The service's cores are those that torch computes with: OMP_NUM_THREADS, or those that the process may use.
    """
    told = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(told) if told.isdecimal() else len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, _MOST_THREADS))


class Blake3:
    """The BLAKE3-256 of bytes that come in pieces."""

    def __init__(self) -> None:
        from blake3 import blake3  # noqa: PLC0415 - clients, which hash no weights, lack it

        self._hasher = blake3(max_threads=spare_threads())

    def update(self, piece: memoryview) -> None:
        """Add the next bytes. Other threads run meanwhile."""
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, lower-case hex."""
        return self._hasher.hexdigest()


class Crc32c:
    """The CRC-32C of bytes that come in pieces."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, piece: memoryview) -> None:
        """Add the next bytes."""
        data = np.frombuffer(piece, np.uint8)  # google_crc32c accepts an array, which needs no copy, but no memoryview
        for start in range(0, len(data), _PIECE_BYTES):  # it lets no other thread run meanwhile
            self.value = google_crc32c.extend(self.value, data[start : start + _PIECE_BYTES])


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of a file."""

    blake3: str
    crc32c: int
    sha256: str
    """Empty if it was not asked for."""


def checksums_of(path: Path, *, with_sha256: bool = False) -> Checksums:
    """Return a file's checksums, for which it is read once. SHA-256 takes several times as long as the others.

    Raises FileNotFoundError, NotRegularFile.
    """
    blake3, crc32c, sha256 = Blake3(), Crc32c(), hashlib.sha256()
    _read(path, blake3.update, crc32c.update, *([sha256.update] if with_sha256 else []))
    return Checksums(blake3.hexdigest(), crc32c.value, sha256.hexdigest() if with_sha256 else "")


def blake3_of(path: Path) -> str:
    """Return the BLAKE3-256 of a file, lower-case hex. Raises FileNotFoundError, NotRegularFile."""
    blake3 = Blake3()
    _read(path, blake3.update)
    return blake3.hexdigest()


def crc32c_of(path: Path) -> int:
    """Return the CRC-32C of a file. Raises FileNotFoundError, NotRegularFile."""
    crc32c = Crc32c()
    _read(path, crc32c.update)
    return crc32c.value


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex. Raises FileNotFoundError, NotRegularFile."""
    sha256 = hashlib.sha256()
    _read(path, sha256.update)
    return sha256.hexdigest()


def _read(path: Path, *sinks: Sink) -> None:
    """Pass a file's bytes to all of `sinks`, in order."""
    with open_raw(path) as file:
        size = os.fstat(file.fileno()).st_size
        most = _PIECE_BYTES if spare_threads() == 1 else _SHARED_PIECE_BYTES
        buffer = memoryview(bytearray(max(1, min(most, size))))
        while read := file.readinto(buffer):
            for sink in sinks:
                sink(buffer[:read])
