"""The base weights that a sampler lends to a trainer on the same machine (bridge `shared`): where they lie, and whose.

The directory holds `manifest.json`, which names every tensor, on CPUs `weights-<generation>`, the segment that they lie
in, and `owner`, which the process that holds the weights keeps locked while it lives. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import BaseMismatch, BaseUnavailable
from paceline.layout import write_file

MANIFEST, OWNER, SEGMENT = "manifest.json", "owner", "weights-"

_CLAIM_SECONDS = 2.0
"""How long a claim waits; one who looks whether the owner lives holds the lock for an instant."""


@dataclass(frozen=True, slots=True)
class CudaStorage:
    """What opens another process's memory on the same GPU: the values of torch's `UntypedStorage._share_cuda_`."""

    device_uuid: str
    handle: bytes
    """cudaIpcMemHandle_t of the allocation."""
    offset: int
    """Bytes from the allocation's start."""
    counter: bytes
    """Name of torch's file of reference counters."""
    counter_offset: int
    event: bytes
    """cudaIpcEventHandle_t of what was queued on the GPU when the memory was shared."""
    event_sync: bool


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A piece of memory that tensors lie in: a file of the directory, or memory of a GPU."""

    size: int
    """Bytes."""
    file: str = ""
    cuda: CudaStorage | None = None


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A parameter under the name that Hugging Face gives it. Several may lie in each other's bytes: tied weights do."""

    name: str
    dtype: str
    """torch's name, such as bfloat16."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements."""
    storage: int
    """Index of its storage."""
    offset: int
    """Bytes from the storage's start."""


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """All of a base model's weights."""

    generation: str
    """Unique for each time that the weights were put there."""
    model: str
    """The base model's name for clients."""
    writable: bool
    """Whether the weights change: a trainer then writes them and computes with others."""
    storages: list[SharedStorage]
    tensors: list[SharedTensor]

    def write(self, directory: Path) -> None:
        """Make the manifest visible, all at once."""
        write_file(directory / MANIFEST, msgspec.json.encode(self))


def read_base(directory: Path) -> BaseManifest:
    """Return the manifest of weights whose owner lives. Raises BaseUnavailable; BaseMismatch of anything else."""
    try:
        if not _is_own(directory):
            raise BaseMismatch(f"{directory} belongs to another user; run trainer and sampler as one.")
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=BaseManifest)
    except FileNotFoundError as error:
        raise _unavailable(directory) from error
    except msgspec.MsgspecError as error:
        raise BaseMismatch(f"{directory / MANIFEST} is no manifest of base weights: {error}.") from error
    if not _is_claimed(directory):
        raise _unavailable(directory)
    return manifest


def is_lent(directory: Path, generation: str) -> bool:
    """Return whether the weights of a generation are still there, and those of the directory."""
    try:
        return read_base(directory).generation == generation
    except (BaseMismatch, BaseUnavailable):
        return False


def claim(directory: Path) -> int:
    """Make the directory this process's own, emptied of what an owner before left; returns the lock's descriptor.

    The lock goes when the process does, whatever ends it. Raises BlockingIOError when another owner lives,
    PermissionError where the directory is another user's.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(directory):
        raise PermissionError(f"{directory} belongs to another user; choose another base_dir")
    descriptor, deadline = os.open(directory / OWNER, os.O_CREAT | os.O_RDWR, 0o600), time.monotonic() + _CLAIM_SECONDS
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
    """Remove manifest and segments. Whoever has mapped them keeps the memory."""
    for path in (directory / MANIFEST, *directory.glob(f"{SEGMENT}*")):
        path.unlink(missing_ok=True)


def _is_own(directory: Path) -> bool:
    return directory.stat().st_uid == os.geteuid()


def _is_claimed(directory: Path) -> bool:
    with suppress(FileNotFoundError), (directory / OWNER).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _unavailable(directory: Path) -> BaseUnavailable:
    return BaseUnavailable(
        f"no sampler lends its base weights in {directory}; start one whose bridge is shared and whose base_dir is this"
    )
