"""Weights in a sampler's memory (bridge `shared`): borrow them as the base model, or write a run's weights there.

A borrowed model is transformers' own around views of the sampler's tensors, under Hugging Face's names; weights that
vLLM fused appear as views of their parts. transformers computes buffers itself, such as rotary embeddings' inverse
frequencies, scaled or not. A borrowed weight is only read. If samplers allow it (`in_place`), full-parameter runs write
theirs instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.base_model.weight_sharing import (
    BaseManifest,
    CudaStorage,
    SharedStorage,
    SharedTensor,
    WriteRequest,
    read_base,
    write_turn,
)
from paceline.errors import BaseMismatch, BaseUnavailable, PacelineError
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import PublishedAs

_PAGE_BYTES = 4096

_log = logging.getLogger(__name__)


def borrow_base_model(options: EngineOptions, attention: str) -> PreTrainedModel | None:
    """Build the model on the weights that a sampler lends in `options.base_dir`; return None if it is to be loaded.

    Raises BaseUnavailable while no sampler lends any, BaseMismatch if its weights do not fit, and OSError if the
    model's configuration cannot be read.
    """
    if not options.base_dir:
        return None
    directory = Path(options.base_dir)
    manifest = read_base(directory)
    if manifest.writable:
        return None
    if manifest.model != options.model_name:
        raise BaseMismatch(
            f"the sampler lends {manifest.model}, and the trainer's model is {options.model_name}; "
            "give both the same model and model_name."
        )
    config = AutoConfig.from_pretrained(options.model_path, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=getattr(torch, options.dtype), attn_implementation=attention, trust_remote_code=False
        )
    _attach(model, open_tensors(directory, manifest, torch.device(options.device)))
    return model


def open_tensors(
    directory: Path, manifest: BaseManifest, device: torch.device, *, writable: bool = False
) -> dict[str, Tensor]:
    """Map the weights of a manifest: views by name, without copies.

    On a CPU, writes reach the sampler only if `writable`. Raises BaseMismatch if the weights are not on `device`,
    BaseUnavailable if they no longer exist.
    """
    storages = [_open_storage(directory, storage, device, writable=writable) for storage in manifest.storages]
    return {tensor.name: _view(tensor, storages) for tensor in manifest.tensors}


def _attach(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Make tensors a model's parameters, by name. The parameters must be on the meta device, the buffers must not.

    Raises BaseMismatch, naming the first problem, if the model has a parameter or a saved buffer that the tensors lack
    or that differs in shape or dtype, if tied weights do not share memory, or if a tensor is left over.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    saved = [name for name in model.state_dict() if name not in names]
    for name in (*names, *saved):
        if name not in tensors and not _is_tied_copy(name, model):
            raise BaseMismatch(f"the sampler does not lend {name}, which {type(model).__name__} has.")
    for name, parameter in list(model.named_parameters()):
        _check_alike(name, parameter, tensors[name])
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(tensors[name], requires_grad=False))
    model.tie_weights()
    _check_complete(model, tensors)


def _check_complete(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in parameters:
            raise BaseMismatch(f"the sampler lends {name}, which {type(model).__name__} does not have.")
        if parameters[name].data_ptr() != tensor.data_ptr():
            raise BaseMismatch(f"{name} is tied in {type(model).__name__}, and a tensor of its own in the sampler.")
    for name, value in (*parameters.items(), *model.named_buffers()):
        if value.is_meta:
            raise BaseMismatch(f"{name} of {type(model).__name__} has no value.")


def _is_tied_copy(name: str, model: PreTrainedModel) -> bool:
    """Return whether a name is a later name of a parameter that the model lists under another one."""
    return name not in dict(model.named_parameters()) and name in dict(model.named_parameters(remove_duplicate=False))


def _check_alike(name: str, parameter: Tensor, tensor: Tensor) -> None:
    if parameter.shape != tensor.shape:
        raise BaseMismatch(
            f"{name} has shape {list(tensor.shape)} in the sampler and {list(parameter.shape)} in the trainer; "
            "give both the same model."
        )
    if parameter.dtype != tensor.dtype:
        theirs, ours = (str(one.dtype).removeprefix("torch.") for one in (tensor, parameter))
        raise BaseMismatch(
            f"{name} is {theirs} in the sampler and {ours} in the trainer; "
            "set PACELINE_SAMPLER_DTYPE and PACELINE_TRAINER_DTYPE to the same."
        )


def _view(tensor: SharedTensor, storages: list[torch.UntypedStorage]) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    storage = storages[tensor.storage]
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if tensor.offset % dtype.itemsize or tensor.offset + (steps + 1) * dtype.itemsize > storage.nbytes():
        raise BaseMismatch(f"the manifest places {tensor.name} where the sampler has no memory for it.")
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, tensor.offset // dtype.itemsize, tensor.shape, tensor.strides)


def _open_storage(
    directory: Path, storage: SharedStorage, device: torch.device, *, writable: bool
) -> torch.UntypedStorage:
    if storage.cuda is not None:
        return _open_cuda(storage.size, storage.cuda, device)
    if device.type != "cpu":
        raise BaseMismatch(f"the sampler's weights are in the host's memory, and the trainer computes on {device}.")
    path = directory / Path(storage.file).name
    if not path.exists():
        raise BaseUnavailable(f"the sampler that lent {path} has ended.")
    return torch.from_file(str(path), shared=writable, size=storage.size, dtype=torch.uint8).untyped_storage()


def _open_cuda(size: int, cuda: CudaStorage, device: torch.device) -> torch.UntypedStorage:
    """Open another process's memory on the GPU, as torch/multiprocessing/reductions.py does when unpickling."""
    if device.type != "cuda":
        raise BaseMismatch(f"the sampler's weights are on a GPU, and the trainer computes on {device}.")
    index = torch.cuda.current_device() if device.index is None else device.index
    ours = str(torch.cuda.get_device_properties(index).uuid)
    if ours != cuda.device_uuid:
        raise BaseMismatch(
            f"the sampler's weights are on GPU {cuda.device_uuid}, and the trainer computes on {ours}; "
            "give both the same GPU by CUDA_VISIBLE_DEVICES."
        )
    opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001
        index, cuda.handle, size, cuda.offset, cuda.counter, cuda.counter_offset, cuda.event, cuda.event_sync
    )
    return opened


def publish_in_place(
    directory: Path, device: torch.device, weights: Mapping[str, Tensor], version: PublishedAs
) -> None:
    """Write weights, by Hugging Face's names, as a version; it is active when this returns.

    Failures are only logged: the version also goes to the volume, from which the sampler then loads it.
    """
    try:
        _write(directory, device, weights, version)
    except PacelineError as error:
        _log.warning("version %d not written in place: %s %s", version.version, error.reason, error.message)


@torch.no_grad()
def _write(directory: Path, device: torch.device, weights: Mapping[str, Tensor], version: PublishedAs) -> None:
    manifest = read_base(directory)
    if not manifest.writable:
        return
    # Mapped for this write only: a lasting mapping would keep the memory of a sampler that has ended.
    pairs = _pairs(open_tensors(directory, manifest, device, writable=True), weights)
    if device.type == "cpu":
        # Make the system map every page now rather than while the sampler is paused.
        for target, _ in pairs:
            target.view(-1)[:: _PAGE_BYTES // target.element_size()].sum()
    request = WriteRequest(manifest.generation, version.run_id, version.version, version.tenant)
    with write_turn(directory, request):
        for target, source in pairs:
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _pairs(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each destination with its weight, once. Raises BaseMismatch, naming the first without a counterpart."""
    for name, weight in weights.items():
        if name not in tensors or tensors[name].shape != weight.shape:
            raise BaseMismatch(f"the sampler does not lend {name} with shape {list(weight.shape)}.")
    pairs = {tensors[name].data_ptr(): (tensors[name], weight) for name, weight in weights.items()}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in pairs:
            raise BaseMismatch(f"the run has no {name}, which the sampler lends.")
    return list(pairs.values())
