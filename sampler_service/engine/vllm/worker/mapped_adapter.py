"""An adapter whose tensors are views of its staged safetensors file and are scaled only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from paceline.layout import WEIGHTS_FILE
from paceline.types.v1 import tensor_pb2
from paceline.weights import read_tensor_entries

_DTYPES = {
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class View:
    """Location of a matrix in the file."""

    dtype: torch.dtype
    offset: int
    """Offset in bytes."""
    shape: tuple[int, int]

    def of(self, typed: TypedViews) -> Tensor:
        """Return the matrix in a mapped file; a copy if its offset is not a multiple of its dtype's size."""
        index, rest = divmod(self.offset, self.dtype.itemsize)
        if rest:
            size = self.shape[0] * self.shape[1] * self.dtype.itemsize
            return typed.data[self.offset : self.offset + size].clone().view(self.dtype).view(self.shape)
        return typed[self.dtype].as_strided(self.shape, (self.shape[1], 1), index)


@dataclass(frozen=True, slots=True)
class Stored:
    """Locations of A [r, in] and B [out, r] for one module of the base model, and alpha / r (or alpha / sqrt(r))."""

    a: View
    b: View
    scaling: float


@dataclass(frozen=True, slots=True)
class Matrices:
    """A and B of one module as tensors; B is not scaled."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of an adapter's file. It is the same for all versions of a run, so it is read only once."""

    rank: int
    size: int
    modules: Mapping[str, Sequence[Stored | None]]
    """vLLM's name of a layer -> one entry, or one for each module that vLLM packed into it."""
    packed: frozenset[str]
    """The layers that vLLM packed."""


def read_layout(
    directory: Path,
    peft: PEFTHelper,
    layers: Iterable[str],
    packed: Mapping[str, Sequence[str]],
    rename: Callable[[str], str],
) -> Layout:
    """Read the header of an adapter's file.

    `layers` are vLLM's layers that can have adapters, `packed` lists the modules of each packed layer, and `rename`
    maps Hugging Face's names to vLLM's.
    """
    path = directory / WEIGHTS_FILE
    sides: tuple[dict[str, View], dict[str, View]] = ({}, {})
    for entry in read_tensor_entries(path):
        module, is_a = parse_fine_tuned_lora_name(entry.name)
        sides[is_a][module] = View(_DTYPES[entry.dtype], entry.offset, (entry.shape[0], entry.shape[1]))
    b_views, a_views = sides
    stored = {
        rename(module): Stored(a, b_views[module], peft.get_rank_and_scaling(module)[1])
        for module, a in a_views.items()
    }
    parts = {layer: [stored.get(name) for name in packed.get(layer, [layer])] for layer in layers}
    modules = {layer: found for layer, found in parts.items() if any(found)}
    return Layout(peft.r, path.stat().st_size, modules, frozenset(packed.keys() & modules.keys()))


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
        parts = matrices(self.layout.modules[module_name], TypedViews(self.data))
        a = [part and part.a for part in parts]
        b = [part and part.b.to(self._dtype) * part.scaling for part in parts]
        if module_name in self.layout.packed:
            ones = [1] * len(parts)
            return PackedLoRALayerWeights(module_name, self.rank, ones, a, b, ones)  # type: ignore[arg-type]
        return LoRALayerWeights(module_name, self.rank, 1, a[0], b[0], 1)  # type: ignore[arg-type]


class TypedViews(dict[torch.dtype, Tensor]):
    """Views of a file's bytes, by dtype, created on demand."""

    def __init__(self, data: Tensor) -> None:
        """Wrap `data`, uint8 [size]."""
        super().__init__()
        self.data = data

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        whole = len(self.data) - len(self.data) % dtype.itemsize
        self[dtype] = self.data[:whole].view(dtype)
        return self[dtype]


def matrices(parts: Sequence[Stored | None], typed: TypedViews) -> list[Matrices | None]:
    """Return views of a layer's matrices, one pair for each module that vLLM packed into it."""
    return [None if part is None else Matrices(part.a.of(typed), part.b.of(typed), part.scaling) for part in parts]


def map_file(path: Path, size: int) -> Tensor:
    """Map a file of `size` bytes as uint8 [size], without copying. Writes to the tensor do not reach the file."""
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def read_file(path: Path, size: int) -> Tensor:
    """Read a file of `size` bytes as uint8 [size], for files that may be removed or truncated while in use."""
    data = torch.empty(size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        view, done = data.numpy().data, 0
        while done < size and (count := file.readinto(view[done:])):
            done += count
    if done != size:
        raise OSError(f"{path} is shorter than {size} bytes")
    return data
