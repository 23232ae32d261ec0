"""Write a full-parameter run's weights into the memory that a sampler computes with (bridge `shared`, `in_place`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import BaseMismatch, PacelineError
from paceline.weight_sharing import WriteRequest, read_base, write_turn
from trainer_service.engine.protocol import PublishedAs
from trainer_service.engine.weight_sharing.imported_base import open_tensors

_PAGE_BYTES = 4096

_log = logging.getLogger(__name__)


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
        _touch(target for target, _ in pairs)
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
            raise BaseMismatch(f"the sampler lends no {name} of shape {list(weight.shape)}.")
    pairs = {tensors[name].data_ptr(): (tensors[name], weight) for name, weight in weights.items()}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in pairs:
            raise BaseMismatch(f"the run has no {name}, which the sampler lends.")
    return list(pairs.values())


def _touch(tensors: Iterable[Tensor]) -> None:
    """Make the system map every page now rather than while the sampler is paused."""
    for tensor in tensors:
        tensor.view(-1)[:: _PAGE_BYTES // tensor.element_size()].sum()
