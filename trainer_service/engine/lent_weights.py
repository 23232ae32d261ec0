"""Writes a full-parameter run's weights where a sampler computes with them (bridge `shared`, `in_place`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import BaseMismatch, PacelineError
from paceline.shared_base import BaseManifest, read_base
from paceline.shared_writes import WriteRequest, write_turn
from trainer_service.engine.base import PublishedAs
from trainer_service.engine.borrowed_base import open_tensors

_log = logging.getLogger(__name__)


class LentWeights:
    """The weights that the sampler of `directory` lends now, mapped once for each generation."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._generation = ""
        self._tensors: dict[str, Tensor] = {}

    def publish(self, weights: Mapping[str, Tensor], version: PublishedAs) -> None:
        """Write weights, by Hugging Face's names, as a version; it is active when this returns.

        What keeps them from it is logged: the version is on the volume all the same, from where the sampler takes it.
        """
        try:
            manifest = read_base(self._directory)
            if manifest.writable:
                self._write(manifest, weights, version)
        except PacelineError as error:
            _log.warning("version %d not written in place: %s %s", version.version, error.reason, error.message)

    @torch.no_grad()
    def _write(self, manifest: BaseManifest, weights: Mapping[str, Tensor], version: PublishedAs) -> None:
        pairs = self._pairs(manifest, weights)
        request = WriteRequest(manifest.generation, version.run_id, version.version, version.tenant)
        with write_turn(self._directory, request):
            for target, source in pairs:
                target.copy_(source)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _pairs(self, manifest: BaseManifest, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return where each weight goes, each place once. Raises BaseMismatch naming the first that fits nothing."""
        if manifest.generation != self._generation:
            self._tensors = open_tensors(self._directory, manifest, self._device, writable=True)
            self._generation = manifest.generation
        for name, weight in weights.items():
            if name not in self._tensors or self._tensors[name].shape != weight.shape:
                raise BaseMismatch(f"the sampler lends no {name} of shape {list(weight.shape)}.")
        pairs = {self._tensors[name].data_ptr(): (self._tensors[name], weight) for name, weight in weights.items()}
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() not in pairs:
                raise BaseMismatch(f"the run has no {name}, which the sampler lends.")
        return list(pairs.values())
