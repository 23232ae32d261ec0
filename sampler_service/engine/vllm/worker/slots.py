"""Puts adapters directly into vLLM's slots: one copy from the staged file.

vLLM itself would read the file into tensors, scale them in a copy, clear the slot and copy again. Here an adapter's
tensors are views of its file, scaled only when they are read. Everything else remains vLLM's: which adapter is in which
slot, which one is evicted if all are taken, and how an evicted one returns, for which vLLM asks the adapter for its
weights.

Loading takes a quarter of the time of vLLM's own (`make bench-publish`), and on a CPU, where it touches no slot of a
running step, it need not wait for the end of the step (`cpu.mid_step_loads`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from paceline.files.regular_files import open_raw, read_file
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.types.v1 import tensor_pb2
from paceline.weights import read_header, read_tensor_entries
from sampler_service.engine.vllm.worker.internals import VllmInternals

_MOST_LAYOUTS = 64
"""Most cached layouts; there is one for each combination of rank, modules, alpha and dtype."""

_LAYERS = (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
"""Layers whose weights are an A and a B for each part. A mixture's experts are stacked in other ways."""

_PLAIN = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)
"""`set_lora` of layers that store A and B unchanged, each part in slot tensors of its own."""

_DTYPES = {
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
}

_PIECE_BYTES = 16 << 20
"""Size of a pinned buffer: large enough to saturate the bus, and small enough to keep."""
_BUFFERS = 2
"""Number of buffers: one is filled while the other is sent."""

Wait = Callable[[], object]
Send = Callable[[Tensor, Tensor], Wait]
"""Starts to copy a buffer to its place on the device; returns a function that waits for the copy."""


TypedFile = Mapping[torch.dtype, Tensor]
"""A file's bytes as 1-D tensors of each dtype; made once, because hundreds of matrices are views of them."""


@dataclass(frozen=True, slots=True)
class _View:
    """Location of a matrix in the file."""

    dtype: torch.dtype
    offset: int
    """Offset in bytes."""
    shape: tuple[int, int]

    def of(self, file: TypedFile) -> Tensor:
        """Return the matrix in the file; a copy if its offset is not a multiple of its dtype's size."""
        index, rest = divmod(self.offset, self.dtype.itemsize)
        if rest:
            size = self.shape[0] * self.shape[1] * self.dtype.itemsize
            return file[torch.uint8][self.offset : self.offset + size].clone().view(self.dtype).view(self.shape)
        return file[self.dtype].as_strided(self.shape, (self.shape[1], 1), index)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Locations of A [r, in] and B [out, r] for one module of the base model, and alpha / r (or alpha / sqrt(r))."""

    a: _View
    b: _View
    scaling: float


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A and B of one module as tensors; B is not scaled."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of an adapter's file. It is the same for all versions of a run, so it is read only once."""

    rank: int
    size: int
    modules: Mapping[str, Sequence[_Stored | None]]
    """vLLM's name of a layer -> one entry, or one for each module that vLLM packed into it."""
    packed: frozenset[str]
    """The layers that vLLM packed."""

    @classmethod
    def read(cls, directory: Path, internals: VllmInternals) -> Layout:
        """Read an adapter's header and configuration. Raises ValueError if vLLM does not support such adapters."""
        path, peft = directory / WEIGHTS_FILE, internals.read_config(directory)
        sides: tuple[dict[str, _View], dict[str, _View]] = ({}, {})
        for entry in read_tensor_entries(path):
            module, is_a = parse_fine_tuned_lora_name(entry.name)
            sides[is_a][module] = _View(_DTYPES[entry.dtype], entry.offset, (entry.shape[0], entry.shape[1]))
        b_views, a_views = sides
        stored = {
            internals.rename(module): _Stored(a, b_views[module], peft.get_rank_and_scaling(module)[1])
            for module, a in a_views.items()
        }
        packed = internals.packed
        parts = {layer: [stored.get(name) for name in packed.get(layer, [layer])] for layer in internals.layers}
        modules = {layer: found for layer, found in parts.items() if any(found)}
        return cls(peft.r, path.stat().st_size, modules, frozenset(packed.keys() & modules.keys()))

    def matrices(self, layer: str, file: TypedFile) -> list[_Matrices | None]:
        """Return views of a layer's matrices: a pair for each module that vLLM packed into it."""
        parts = self.modules[layer]
        return [None if one is None else _Matrices(one.a.of(file), one.b.of(file), one.scaling) for one in parts]


def _typed(data: Tensor) -> TypedFile:
    """Return views of a file's bytes, uint8 [size]."""
    dtypes = (torch.uint8, *_DTYPES.values())
    return {dtype: data[: len(data) - len(data) % dtype.itemsize].view(dtype) for dtype in dtypes}


class MappedAdapter(LoRAModel):
    """Replaces vLLM's own copy in host memory; the weights that vLLM requests are built on demand.

    B is scaled when it is read, never in place. So the staged tensors stay as published, and alpha / r is applied once,
    however often the adapter is put into a slot.
    """

    def __init__(self, adapter_id: int, layout: Layout, data: Tensor, dtype: torch.dtype) -> None:
        """Wrap the bytes of the file, `data`, uint8 [size]; `dtype` is that of vLLM's slots."""
        super().__init__(adapter_id, layout.rank, {})
        self.layout = layout
        self.data = data
        self._dtype = dtype

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """Return a layer's weights as vLLM holds them, with B scaled; None if the adapter has none for this layer."""
        if module_name not in self.layout.modules:
            return None
        parts = self.layout.matrices(module_name, _typed(self.data))
        a = [part and part.a for part in parts]
        b = [part and part.b.to(self._dtype) * part.scaling for part in parts]
        if module_name in self.layout.packed:
            ones = [1] * len(parts)
            return PackedLoRALayerWeights(module_name, self.rank, ones, a, b, ones)  # type: ignore[arg-type]
        return LoRALayerWeights(module_name, self.rank, 1, a[0], b[0], 1)  # type: ignore[arg-type]


def _at_once() -> None: ...


class Pieces:
    """Copies bytes through buffers, each of which is refilled once its content has been sent."""

    def __init__(self, buffers: Sequence[Tensor], send: Send) -> None:
        """`buffers` are uint8 tensors of the same size."""
        self._buffers = buffers
        self._send = send
        self._sent: list[Wait] = [_at_once] * len(buffers)
        """Waits for each buffer's last copy. They outlast a call, which returns while the last pieces are in flight."""

    def copy(self, data: Tensor, into: Tensor) -> None:
        """Copy `data` into `into`, both uint8 [N]; return when the last piece is in flight."""
        size = len(self._buffers[0])
        for number, start in enumerate(range(0, len(data), size)):
            which, piece = number % len(self._buffers), data[start : start + size]
            self._sent[which]()
            staged = self._buffers[which][: len(piece)]
            staged.copy_(piece)
            self._sent[which] = self._send(into[start : start + size], staged)


class Uploader:
    """Copies adapters' bytes to the device of one worker's slots, in the worker's own thread; in host memory a no-op.

    A GPU copies pageable memory only through a buffer of the driver, while the process waits. Here the bytes go through
    two pinned buffers, in pieces, on a separate stream, beside the step that the GPU is computing.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is that of the slots."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            buffers = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
            self._pieces = Pieces(buffers, self._send)

    def upload(self, data: Tensor) -> Tensor:
        """Return the bytes, uint8 [N], on the device, for work queued on the current stream from now on."""
        if self._stream is None:
            return data.to(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            into = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            self._pieces.copy(data, into)
        current.wait_stream(self._stream)
        # The tensor was allocated on the other stream, which must not reuse its memory while this one reads it.
        into.record_stream(current)
        return into

    def _send(self, into: Tensor, staged: Tensor) -> Wait:
        into.copy_(staged, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(self._stream)
        return sent.synchronize


@dataclass(frozen=True, slots=True)
class _SlotPlan:
    """Where an adapter's matrices go in a slot; it is the same for all adapters of one layout."""

    plain: list[str] = field(default_factory=list)
    """Layers that are written here; vLLM sets and clears the others."""
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    rest: list[Tensor] = field(default_factory=list)
    """The parts of the slot in those layers that the matrices do not cover."""


class SlotWriter:
    """Writes into the slots of one worker, in the worker's own thread."""

    def __init__(self, internals: VllmInternals) -> None:
        self._internals = internals
        self._uploader = Uploader(internals.device)
        self._dtype = internals.dtype
        self._layouts: dict[tuple[bytes, bytes], Layout] = {}
        self._plans: dict[tuple[int, Layout], _SlotPlan] = {}
        self._touched: set[str] = set()
        """Layers that some adapter has written; in all others every slot is still zero."""

    @property
    def writes_all_layers(self) -> bool:
        """Whether this class can write every layer that can have adapters."""
        return all(isinstance(layer, _LAYERS) for layer in self._internals.layers.values())

    def _layout(self, directory: Path) -> Layout | None:
        """Return the layout of an adapter; None if it is on a layer that this class cannot write."""
        key = (read_header(directory / WEIGHTS_FILE), read_file(directory / CONFIG_FILE))
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
                self._plans.clear()
            self._layouts[key] = Layout.read(directory, self._internals)
            self._touched |= self._layouts[key].modules.keys()
        layout = self._layouts[key]
        return layout if all(isinstance(self._internals.layers[name], _LAYERS) for name in layout.modules) else None

    def add(self, adapter_id: int, directory: Path, *, in_memory: bool) -> bool | None:
        """Register an adapter and put it into a slot; return False if running requests use every slot.

        In that case vLLM finds a slot when it first schedules a request for the adapter. Return None, and do nothing,
        if the adapter is on a layer that this class cannot write. `in_memory` means that the file is in memory and
        never changes, so that it can be mapped instead of read.
        """
        layout = self._layout(directory)
        if layout is None:
            return None
        if self._internals.holds(adapter_id):
            return True
        data = (_map_file if in_memory else _read_file)(directory / WEIGHTS_FILE, layout.size)
        adapter = MappedAdapter(adapter_id, layout, data, self._dtype)
        slot = self._internals.empty_a_slot()
        if slot is not None:
            self._write(slot, adapter)
        self._internals.register(adapter, slot)
        return slot is not None

    def _write(self, slot: int, adapter: MappedAdapter) -> None:
        """Write every layer of a slot, so that nothing of its previous adapter remains."""
        file, sources = _typed(self._uploader.upload(adapter.data)), list[_Matrices]()
        plan = self._plans.get((slot, adapter.layout)) or self._plan(slot, adapter.layout)
        for name in plan.plain:
            sources += filter(None, self._of_this_rank(name, adapter.layout, file))
        _copy_all(plan.a, [source.a for source in sources])
        if all(source.scaling == 1 for source in sources):
            _copy_all(plan.b, [source.b for source in sources])
        else:
            for b, source in zip(plan.b, sources, strict=True):
                _copy_scaled(b, source)
        for rest in plan.rest:
            rest.zero_()
        # vLLM writes layers of other kinds. One that this adapter lacks may hold the previous adapter's weights.
        for name in self._touched - set(plan.plain):
            layer, weights = self._internals.layers[name], adapter.get_lora(name)
            if weights is None:
                layer.reset_lora(slot)
            else:
                layer.set_lora(slot, weights.lora_a, weights.lora_b)

    def _plan(self, slot: int, layout: Layout) -> _SlotPlan:
        plan, shapes = _SlotPlan(), _typed(torch.empty(layout.size, dtype=torch.uint8, device="meta"))
        for name, stored in layout.modules.items():
            layer = self._internals.layers[name]
            if type(layer).set_lora not in _PLAIN or len(stored) != layer.n_slices:
                continue
            plan.plain.append(name)
            for i, part in enumerate(self._of_this_rank(name, layout, shapes)):
                a, b = (None, None) if part is None else (part.a, part.b)
                _place(layer.lora_a_stacked[i][slot, 0], a, plan.a, plan.rest)
                _place(layer.lora_b_stacked[i][slot, 0], b, plan.b, plan.rest)
        self._plans[slot, layout] = plan
        return plan

    def _of_this_rank(self, name: str, layout: Layout, file: TypedFile) -> Sequence[_Matrices | None]:
        """Return a layer's matrices, cut to this worker's shard under tensor parallelism."""
        layer: Any = self._internals.layers[name]
        parts = layout.matrices(name, file)
        if layer.tp_size == 1:
            return parts
        a: Any = [None if part is None else part.a for part in parts]
        b: Any = [None if part is None else part.b for part in parts]
        if name in layout.packed:
            a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
        else:
            a, b = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
        cut = zip(parts, a, b, strict=True)
        return [None if part is None else _Matrices(one_a, one_b, part.scaling) for part, one_a, one_b in cut]


def _place(slot: Tensor, matrix: Tensor | None, into: list[Tensor], rest: list[Tensor]) -> None:
    """Record which part of a slot's matrix an adapter's matrix fills, and which parts remain."""
    rows, columns = (0, 0) if matrix is None else matrix.shape
    if matrix is not None:
        into.append(slot[:rows, :columns])
    rest.extend(part for part in (slot[rows:], slot[:rows, columns:]) if part.numel())


def _copy_all(into: list[Tensor], sources: list[Tensor]) -> None:
    """Copy matrices in one call; an adapter that has only the output head has none here."""
    if into:
        torch._foreach_copy_(into, sources)


def _copy_scaled(into: Tensor, source: _Matrices) -> None:
    """Round to the slot's dtype, then scale, in the same order as vLLM, which gives the same bits."""
    if source.b.dtype == into.dtype:
        torch.mul(source.b, source.scaling, out=into)
    else:
        into.copy_(source.b).mul_(source.scaling)


def _map_file(path: Path, size: int) -> Tensor:
    """Map a file of `size` bytes as uint8 [size], without copying. Writes to the tensor do not reach the file."""
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _read_file(path: Path, size: int) -> Tensor:
    """Read a file of `size` bytes as uint8 [size], for files that may be removed or truncated while in use."""
    data = torch.empty(size, dtype=torch.uint8)
    with open_raw(path) as file:
        view, done = data.numpy().data, 0
        while done < size and (count := file.readinto(view[done:])):
            done += count
    if done != size:
        raise OSError(f"{path} is shorter than {size} bytes")
    return data
