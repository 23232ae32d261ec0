"""Save a run's current state while the run continues.

An `AsyncSave` refers to the run's own tensors, so creating one takes no time. The tensors are copied before they
change: by the thread that writes the files, or by the command that changes them, whichever is first. Code that changes
a run's tensors in place first calls `AsyncSave.secure` on all of the run's saves (`EngineRun.before_change`). Tensors
that are replaced by new ones need no copy.

The bytes of a file equal those that the safetensors library writes for the same tensors, without its copy in memory.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline import layout
from trainer_service.engine.runs.preallocated_file import SERIAL_ELEMENTS, MappedFile, PreallocatedFile

_ORDER = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64)
"""dtypes in safetensors' order; tensors of the last dtype come first, so that all are aligned."""
_NAMES = dict(zip(_ORDER, ("U8", "I8", "F16", "BF16", "I32", "F32", "I64"), strict=True))
_HEADER_ALIGNMENT = 8
_COPY_ALIGNMENT = 64
_BATCH_ELEMENTS = 1 << 23
"""Elements that are gathered on a GPU before they are transferred: 32 MiB in float32."""


class StagingMemory:
    """A pool of memory for copies, within a limit. Buffers are kept, so that their pages exist when they are reused."""

    def __init__(self, limit_bytes: int, *, pinned: bool = False) -> None:
        self._limit = limit_bytes
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._bytes = 0
        self._lock = Lock()

    def take(self, size: int) -> Tensor | None:
        """Return a buffer of `size` bytes or more (uint8); None if those in use leave too few bytes."""
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= size]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
            while self._free and self._bytes + size > self._limit:
                self._bytes -= self._free.pop(0).numel()
            if self._bytes + size > self._limit:
                return None
            self._bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer from `take` to the pool."""
        with self._lock:
            self._free.append(buffer)


@dataclass(frozen=True)
class TensorFile:
    """The content of one safetensors file. The layout is computed once."""

    name: str
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    """dtype of floating-point tensors in the file; None means each tensor's own."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return a tensor's dtype in the file."""
        return tensor.dtype if self.dtype is None or not tensor.is_floating_point() else self.dtype

    @cached_property
    def ordered(self) -> list[tuple[str, Tensor]]:
        """The tensors in the order of their bytes in the file."""
        return sorted(self.tensors.items(), key=lambda item: (-_ORDER.index(self.dtype_of(item[1])), item[0]))

    @cached_property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.numel() * self.dtype_of(tensor).itemsize for tensor in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """The bytes before the tensors."""
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        end = 0
        for name, tensor in self.ordered:
            dtype = self.dtype_of(tensor)
            start, end = end, end + tensor.numel() * dtype.itemsize
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class SaveContent:
    """Content of a directory to write."""

    files: Sequence[TensorFile]
    """At least one."""
    texts: Mapping[str, Any]
    """Name of a file -> content to encode as JSON, or the bytes of a file of another kind."""


class AsyncSave:
    """A run's state at the moment of creation. Any thread may call any method."""

    def __init__(
        self, content: SaveContent, memory: StagingMemory, preallocated: PreallocatedFile | None = None
    ) -> None:
        """Refer to `content`, whose tensors must not be changed in place before `secure`.

        With a single file, `preallocated` may provide it; the next one is then made beside the directory.
        """
        self._files = content.files
        self._texts = content.texts
        self._memory = memory
        self._preallocated = preallocated
        self._mapped: MappedFile | None = None
        self._buffer: Tensor | None = None
        self._lock = Lock()
        self._written = Event()
        self._ready = _event_now(content.files)

    def secure(self) -> None:
        """Return once the tensors may be changed: they are copied or, without memory for a copy, written."""
        with self._lock:
            if self._written.is_set() or self._copy():
                return
        self._written.wait()

    def write(self, directory: Path) -> None:
        """Write the files into a directory, once. Raises DiskFull."""
        try:
            with self._lock:
                if not self._copy():
                    self._write_files(directory, map(self._bytes_of_tensors, self._files))
            if self._buffer is not None and not self._link(directory):
                self._write_files(directory, ([part.numpy().data] for part in self._parts(self._buffer)))
            for name, text in self._texts.items():
                (directory / name).write_bytes(text if isinstance(text, bytes) else _json(text))
        except OSError as error:
            raise layout.translate_os_error(error) from error
        finally:
            self._end(directory)

    def _copy(self) -> bool:
        """Copy the tensors unless they are copied already; return whether there was memory for it."""
        if self._buffer is None:
            self._buffer = self._take_buffer()
            if self._buffer is not None:
                for file, part in zip(self._files, self._parts(self._buffer), strict=True):
                    _copy_file(file, part, self._ready)
        return self._buffer is not None

    def _take_buffer(self) -> Tensor | None:
        """Return memory for the copies. On a CPU that may be the file itself; a GPU copies to pinned memory."""
        if self._preallocated is not None:
            header = self._files[0].header
            self._mapped = self._preallocated.take(len(header) + self._files[0].size)
            if self._mapped is not None:
                self._mapped.content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                if self._ready is None:
                    return self._mapped.content[len(header) :]
        return self._memory.take(sum(_aligned(file.size) for file in self._files))

    def _link(self, directory: Path) -> bool:
        """Name the preallocated file once it has the copies; return False if there is none, or none for `directory`."""
        if self._mapped is None or self._buffer is None:
            return False
        if self._ready is not None:
            self._mapped.content[len(self._files[0].header) :] = self._buffer[: self._files[0].size]
        try:
            self._mapped.link(directory / self._files[0].name)
        except OSError:  # another file system
            return False
        return True

    def _parts(self, buffer: Tensor) -> Iterator[Tensor]:
        start = 0
        for file in self._files:
            yield buffer[start : start + file.size]
            start += _aligned(file.size)

    @staticmethod
    def _bytes_of_tensors(file: TensorFile) -> Iterator[memoryview]:
        for _, tensor in file.ordered:
            yield tensor.detach().to("cpu", file.dtype_of(tensor)).contiguous().view(-1).view(torch.uint8).numpy().data

    def _write_files(self, directory: Path, contents: Iterable[Iterable[memoryview]]) -> None:
        for file, content in zip(self._files, contents, strict=True):
            with (directory / file.name).open("wb", buffering=0) as target:
                for part in itertools.chain([memoryview(file.header)], content):
                    layout.write_all(target.fileno(), part)

    def _end(self, directory: Path) -> None:
        with self._lock:
            files, buffer, mapped = self._files, self._buffer, self._mapped
            self._files, self._buffer, self._mapped = (), None, None
            self._written.set()
        if buffer is not None and (mapped is None or self._ready is not None):
            self._memory.release(buffer)
        if self._preallocated is not None:
            self._preallocated.prepare(directory.parent, len(files[0].header) + files[0].size)


@torch.no_grad()
def _copy_file(file: TensorFile, target: Tensor, ready: torch.cuda.Event | None) -> None:
    """Copy tensors one after another into `target` (uint8, exactly as many bytes)."""
    copy = _copy_on_cpu if ready is None else partial(_copy_from_gpu, ready=ready)
    offset = 0
    for dtype, group in itertools.groupby(file.ordered, key=lambda item: file.dtype_of(item[1])):
        tensors = [tensor for _, tensor in group]
        end = offset + sum(map(Tensor.numel, tensors)) * dtype.itemsize
        copy(target[offset:end].view(dtype), tensors)
        offset = end


def _copy_on_cpu(target: Tensor, tensors: Sequence[Tensor]) -> None:
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    copies = torch.split(target, [piece.numel() for piece in pieces])
    pairs = zip(copies, pieces, strict=True)
    torch._foreach_copy_([copy if piece.dim() == 1 else copy.view(piece.shape) for copy, piece in pairs], pieces)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if not tensor.is_contiguous():
        return (tensor,)
    flat = tensor.view(-1)
    return (flat,) if tensor.numel() <= SERIAL_ELEMENTS else torch.split(flat, SERIAL_ELEMENTS)


def _copy_from_gpu(target: Tensor, tensors: Sequence[Tensor], ready: torch.cuda.Event) -> None:
    """Copy in batches, each converted by one kernel and transferred at once.

    An adapter has hundreds of tensors. While a sampler decodes on the same GPU, each kernel waits for its turn.
    """
    stream, filled = torch.cuda.Stream(), 0  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        for batch in _batches(tensors):
            sizes = [piece.numel() for piece in batch]
            gathered = torch.empty(sum(sizes), dtype=target.dtype, device=batch[0].device)
            torch._foreach_copy_(torch.split(gathered, sizes), batch)
            target[filled : filled + len(gathered)].copy_(gathered, non_blocking=True)
            filled += len(gathered)
    stream.synchronize()


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut flattened tensors, in order, into lists of at most `_BATCH_ELEMENTS` together."""
    batch: list[Tensor] = []
    elements_left = _BATCH_ELEMENTS
    for tensor in tensors:
        rest = tensor.reshape(-1)
        while len(rest):
            batch.append(rest[:elements_left])
            elements_left, rest = elements_left - len(batch[-1]), rest[elements_left:]
            if not elements_left:
                yield batch
                batch, elements_left = [], _BATCH_ELEMENTS
    if batch:
        yield batch


def _event_now(files: Sequence[TensorFile]) -> torch.cuda.Event | None:
    """Return an event after the work queued so far on the GPU that holds the tensors; None on a CPU."""
    if not any(tensor.is_cuda for tensor in files[0].tensors.values()):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _json(content: Any) -> bytes:
    return (json.dumps(msgspec.to_builtins(content), indent=2, sort_keys=True) + "\n").encode()


def _aligned(size: int) -> int:
    return size + -size % _COPY_ALIGNMENT
