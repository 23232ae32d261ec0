"""The base weights that a sampler lends to a trainer on the same machine (bridge `shared`).

Their directory holds `manifest.json`, which lists every tensor; on CPUs `weights-<generation>`, the memory segment with
their data; `owner`, which the process that holds the weights keeps locked while it lives; and `writes`, a Unix
socket, the lock with which the trainer writes the weights. Nothing here imports torch.

Each message on the socket is one line of JSON: the writer announces what it is about to write; the sampler answers when
it may start; the writer reports that it is done; the sampler answers when the version is active. If the writer dies,
the socket closes, and the sampler detects partly written weights.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from paceline.errors import CATALOG, BaseMismatch, BaseUnavailable, Internal
from paceline.files.regular_files import open_file, read_file
from paceline.layout import write_file

MANIFEST, OWNER, SEGMENT, SOCKET = "manifest.json", "owner", "weights-", "writes"

_CLAIM_SECONDS = 2.0
"""How long a claim waits for the lock, which a check of whether the owner is alive holds for an instant."""
_TURN_SECONDS = 60.0
"""How long a writer waits for the lock: the first write waits until requests to the base model have finished."""


@dataclass(frozen=True, slots=True)
class CudaStorage:
    """Handle to another process's memory on the same GPU: the values of torch's `UntypedStorage._share_cuda_`."""

    device_uuid: str
    handle: bytes
    """cudaIpcMemHandle_t of the allocation."""
    offset: int
    """Bytes from the allocation's start."""
    counter: bytes
    """Name of torch's file of reference counters."""
    counter_offset: int
    event: bytes
    """cudaIpcEventHandle_t of the work that was queued on the GPU when the memory was shared."""
    event_sync: bool


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """Memory that holds tensors: a file in the directory, or GPU memory."""

    size: int
    """In bytes."""
    file: str = ""
    cuda: CudaStorage | None = None


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A parameter under its Hugging Face name. Several may overlap in memory, as tied weights do."""

    name: str
    dtype: str
    """torch's name, such as bfloat16."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    storage: int
    """Index into `BaseManifest.storages`."""
    offset: int
    """Bytes from the storage's start."""


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """Manifest of all of a base model's weights."""

    generation: str
    """Unique id of each time the weights were placed in the directory."""
    model: str
    """The base model's name for clients."""
    writable: bool
    """Whether the weights change: the trainer then writes to them and computes with its own."""
    storages: list[SharedStorage]
    tensors: list[SharedTensor]

    def write(self, directory: Path) -> None:
        """Write the manifest atomically."""
        write_file(directory / MANIFEST, msgspec.json.encode(self))


def read_base(directory: Path) -> BaseManifest:
    """Return the manifest of weights whose owner is alive. Raises BaseUnavailable, BaseMismatch."""
    try:
        if not _is_own(directory):
            message = f"{directory} belongs to another user or is a link; run trainer and sampler as the same user."
            raise BaseMismatch(message)
        manifest = msgspec.json.decode(read_file(directory / MANIFEST), type=BaseManifest)
    except FileNotFoundError as error:
        raise _unavailable(directory) from error
    except msgspec.MsgspecError as error:
        raise BaseMismatch(f"{directory / MANIFEST} is not a manifest of base weights: {error}.") from error
    if not _is_claimed(directory):
        raise _unavailable(directory)
    return manifest


def is_lent(directory: Path, generation: str) -> bool:
    """Return whether the directory still lends the weights of this generation."""
    try:
        return read_base(directory).generation == generation
    except (BaseMismatch, BaseUnavailable):
        return False


def claim(directory: Path) -> int:
    """Claim the directory for this process and clear a previous owner's files; return the lock's descriptor.

    The lock is released when the process ends, for whatever reason. Raises BlockingIOError if another owner is alive,
    PermissionError if the directory belongs to another user or is a link.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(directory):
        raise PermissionError(f"{directory} belongs to another user or is a link; choose another base_dir")
    descriptor = os.open(directory / OWNER, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
            time.sleep(0.01)
    clear(directory)
    return descriptor


def clear(directory: Path) -> None:
    """Remove manifest and segments. Processes that have mapped a segment keep its memory."""
    for path in (directory / MANIFEST, *directory.glob(f"{SEGMENT}*")):
        path.unlink(missing_ok=True)


def _is_own(directory: Path) -> bool:
    """Whether a directory, which may lie where others write, is this user's and no link."""
    status = directory.lstat()
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def _is_claimed(directory: Path) -> bool:
    with suppress(FileNotFoundError), open_file(directory / OWNER) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _unavailable(directory: Path) -> BaseUnavailable:
    return BaseUnavailable(
        f"no sampler lends its base weights in {directory}; start one with bridge=shared and this base_dir"
    )


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """The writer's announcement of a write."""

    generation: str
    """Generation of the weights to write."""
    run_id: str
    version: int
    tenant: str
    """Owner of the run."""


@dataclass(frozen=True, slots=True)
class WriteReply:
    """The sampler's answer."""

    refusal: str = ""
    """Reason of the error; empty if the write is accepted."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The writer's report that all weights were written."""

    done: bool = True


@contextmanager
def write_turn(directory: Path, request: WriteRequest) -> Iterator[None]:
    """Hold the lock while the block writes the weights; afterwards the version is active.

    Raises BaseUnavailable if the sampler is not running or ends meanwhile, and the error with which it refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_TURN_SECONDS)
            link.connect(str(directory / SOCKET))
            with cast("BinaryIO", link.makefile("rwb")) as lines:
                _exchange(lines, request)
                yield
                _exchange(lines, WriteDone())
    except OSError as error:
        raise BaseUnavailable(f"the sampler that lends its weights in {directory} does not answer: {error}.") from error


def decode_request(line: bytes) -> WriteRequest:
    """Decode a writer's first line. Raises BaseMismatch."""
    try:
        return msgspec.json.decode(line, type=WriteRequest)
    except msgspec.MsgspecError as error:
        raise BaseMismatch(f"a writer of base weights sent {line[:100]!r}: {error}.") from error


def _exchange(lines: BinaryIO, message: WriteRequest | WriteDone) -> None:
    lines.write(msgspec.json.encode(message) + b"\n")
    lines.flush()
    answer = lines.readline()
    if not answer:
        raise ConnectionError("it closed the connection")
    turn = msgspec.json.decode(answer, type=WriteReply)
    if turn.refusal:
        raise CATALOG.get(turn.refusal, Internal)(turn.message)
