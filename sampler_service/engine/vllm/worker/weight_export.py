"""Lends base weights to a trainer on the same machine: vLLM's own model, with weights that another process can map.

On CPUs they are loaded directly into one segment of shared memory. vLLM would pack the weights of linear layers there
into layouts of its own and drop the originals; a lent model keeps the originals and multiplies with them as they are.
On GPUs the weights stay where vLLM put them and are shared by CUDA IPC.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from paceline.base_model.weight_sharing import SEGMENT, BaseManifest, CudaStorage, SharedStorage, SharedTensor, claim
from paceline.layout import MODEL_FILE
from sampler_service.engine.options import EngineOptions

LOAD_FORMAT = "paceline_lent"
"""vLLM's load_format for lending a model; `extra_config` builds its model_loader_extra_config."""

_ALIGNMENT = 64
"""In bytes; the alignment of torch's own allocations."""


def extra_config(options: EngineOptions) -> dict[str, Any]:
    """Return the directory for lending, the base model's name for clients, and whether the weights are writable."""
    return {
        "directory": str(options.base_dir),
        "model_name": options.model_name,
        "writable": options.in_place != "off",
    }


class PlainLinearMethod(UnquantizedLinearMethod):
    """A linear layer that keeps its weight as loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias."""
        return functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """An embedding or output head that keeps a single copy of its weight."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias."""
        return functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


@register_model_loader(LOAD_FORMAT)
class LendingLoader(BaseModelLoader):
    """Loads a model as vLLM does, and lends its weights until the process ends."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: Any = load_config.model_loader_extra_config
        self._directory, self._model_name = Path(extra["directory"]), extra["model_name"]
        self._writable: bool = extra["writable"]
        self._files = DefaultModelLoader(replace(load_config, load_format="safetensors", model_loader_extra_config={}))
        self._places: Places

    def download_model(self, model_config: ModelConfig) -> None:
        self._files.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Allocate the weights' final memory, then load them.

        Raises RuntimeError for a model whose weights vLLM changes, BlockingIOError if another sampler lends in the same
        directory, OSError if there is not enough shared memory.
        """
        keep_plain(model)
        # The lock is owned until this process ends, in whatever way.
        claim(self._directory)
        if next(model.parameters()).is_cuda:
            self._places = Places()
        else:
            self._places = _place_in_segment(model, self._directory)
        self._files.load_weights(model, model_config)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        self._places.manifest(model, self._model_name, writable=self._writable).write(self._directory)
        return model


@dataclass(slots=True)
class Places:
    """Memory locations of the weights."""

    generation: str = field(default_factory=lambda: uuid4().hex)
    storages: dict[int, tuple[int, SharedStorage]] = field(default_factory=dict)
    """Address of a storage -> its index, and the description with which other processes open it."""

    def manifest(self, model: nn.Module, model_name: str, *, writable: bool) -> BaseManifest:
        """Describe a model's weights. Raises RuntimeError if one is not in shared memory."""
        tensors = [self._describe(name, view) for name, view in hugging_face_views(model)]
        storages = sorted(self.storages.values(), key=itemgetter(0))
        return BaseManifest(self.generation, model_name, writable, [storage for _, storage in storages], tensors)

    def _describe(self, name: str, view: Tensor) -> SharedTensor:
        address = view.untyped_storage().data_ptr()
        if address not in self.storages:
            if not view.is_cuda:
                raise RuntimeError(f"vLLM moved {name} out of shared memory; bridge=shared cannot serve this model")
            self.storages[address] = (len(self.storages), share_cuda(view))
        index, _ = self.storages[address]
        offset = int(view.storage_offset()) * view.element_size()
        dtype = str(view.dtype).removeprefix("torch.")
        return SharedTensor(name, dtype, tuple(view.shape), view.stride(), index, offset)


def share_cuda(tensor: Tensor) -> SharedStorage:
    """Describe the GPU memory of a tensor for another process on the same GPU.

    The values are those that torch.multiprocessing pickles and sends (torch/multiprocessing/reductions.py).
    """
    storage = tensor.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()  # type: ignore[no-untyped-call]
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    cuda = CudaStorage(uuid, handle, offset, counter, counter_offset, event, event_sync)
    return SharedStorage(size, cuda=cuda)


def keep_plain(model: nn.Module) -> None:
    """Make vLLM keep every weight as it is in the files. Raises RuntimeError naming the first layer where it cannot.

    On CPUs this replaces vLLM's methods with ones that do not pack weights.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        own = next(module.parameters(recurse=False), None)
        if own is None or not isinstance(method, QuantizeMethodBase):
            continue
        if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            raise RuntimeError(
                f"bridge=shared lends dense models without quantization; {name} has {type(method).__name__}"
            )
        if not own.is_cuda:
            is_linear = isinstance(method, UnquantizedLinearMethod)
            module.quant_method = PlainLinearMethod() if is_linear else PlainEmbeddingMethod()


def hugging_face_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its name in the checkpoint; fused parameters are split, and padding is cut off."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for full_name, module in model.named_modules(remove_duplicate=False):
        path = full_name.removesuffix(".base_layer")  # vLLM's name for a layer that a LoRA layer wraps
        parent, _, last = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            whole, names = parameter.detach(), packed.get(last, [])
            if isinstance(module, VocabParallelEmbedding):
                whole = whole[: module.org_vocab_size]
            if len(names) < 2:
                yield f"{path}.{kind}", whole
                continue
            for name, part in zip(names, whole.split(module.output_partition_sizes), strict=True):
                yield f"{parent}.{name}.{kind}", part


@torch.no_grad()
def write_model(model: nn.Module, directory: Path) -> None:
    """Overwrite every parameter from a checkpoint's file.

    Raises ValueError, before anything is written, if model and file do not have the same parameters and shapes.
    """
    views, written = dict(hugging_face_views(model)), set[int]()
    with safe_open(directory / MODEL_FILE, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dictionary
        tied = {view.data_ptr() for name, view in views.items() if name in shapes}
        wrong = [name for name, shape in shapes.items() if name not in views or tuple(views[name].shape) != shape]
        if wrong := wrong or [name for name, view in views.items() if view.data_ptr() not in tied]:
            raise ValueError(f"the model in {directory} does not fit: {wrong[0]}")
        for name in shapes:
            # Tied parameters are one memory under several names.
            if views[name].data_ptr() not in written:
                written.add(views[name].data_ptr())
                views[name].copy_(file.get_tensor(name))


def _place_in_segment(model: nn.Module, directory: Path) -> Places:
    """Move every parameter into a new shared memory segment, keeping its values."""
    places, parameters = Places(), list(model.parameters())
    size = sum(_aligned(parameter) for parameter in parameters)
    path = directory / f"{SEGMENT}{places.generation}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Allocate everything now: if memory ran out later, any process that touches it would be killed.
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    segment, offset = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8), 0
    for parameter in parameters:
        memory = segment[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = memory.copy_(parameter.data)
        offset += _aligned(parameter)
    places.storages[segment.untyped_storage().data_ptr()] = (0, SharedStorage(size, path.name))
    return places


def _aligned(tensor: Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % _ALIGNMENT
