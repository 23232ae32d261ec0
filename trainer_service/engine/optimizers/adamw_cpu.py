"""AdamW with moments in host memory that are copied to the device in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.types import AdamParams
from trainer_service.engine.optimizers.adamw import fused_adamw
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of

_BATCH_ELEMENTS = 1 << 24
"""Elements of a batch, whose moments take 128 MiB; a larger weight is a batch of its own."""
_BATCHES_AT_A_TIME = 3
"""One is copied in, one is updated and one is copied back."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """Moments of a batch of weights, on the weights' device."""

    names: list[str]
    first: list[Tensor]
    second: list[Tensor]


class AdamWCpu(Optimizer[AdamParams]):
    """The steps of `AdamW`, bit for bit, with float32 moments in pinned host memory.

    On CUDA one stream copies in the moments of the next batch while the current ones are updated, and another copies
    them back; `step` returns before the last two batches are back. On a CPU it is `AdamW`.
    """

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        self._device = self._largest.device
        self._on_cuda = self._device.type == "cuda"
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, parameter in parameters.items():
                self._tensors[f"{kind}.{name}"] = torch.zeros(parameter.shape, pin_memory=self._on_cuda)
        if self._on_cuda:
            # Kept across steps because the allocator has a memory pool for each stream.
            self._bringing: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._returning: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        return self._tensors

    def reserve(self) -> None:
        if self._on_cuda:
            batch = max(sum(self._parameters[name].numel() for name in names) for names in self._batches())
            with torch.cuda.stream(self._bringing):
                torch.empty(_BATCHES_AT_A_TIME, 2, batch, device=self._device)

    def _update(self, params: AdamParams, step: int) -> None:
        if self._on_cuda:
            self._update_in_turns(params, step)
        else:
            names = list(self._parameters)
            self._apply(
                _Visit(names, self._moments("exp_avg", names), self._moments("exp_avg_sq", names)), params, step
            )

    def _update_in_turns(self, params: AdamParams, step: int) -> None:
        computing, returned = torch.cuda.current_stream(self._device), list[torch.cuda.Event]()
        self._bringing.wait_stream(computing)
        for names in self._batches():
            if len(returned) > 1:
                returned[-2].synchronize()
            with torch.cuda.stream(self._bringing):
                visit = _Visit(names, self._bring("exp_avg", names), self._bring("exp_avg_sq", names))
            computing.wait_stream(self._bringing)
            self._apply(visit, params, step)
            self._returning.wait_stream(computing)
            with torch.cuda.stream(self._returning):
                self._take_back(visit, (computing, self._returning))
                returned.append(self._returning.record_event())
        # The next step must find the moments in host memory.
        computing.wait_stream(self._returning)

    def _apply(self, visit: _Visit, params: AdamParams, step: int) -> None:
        weights = [self._parameters[name] for name in visit.names]
        gradients = [gradient_of(weight) for weight in weights]
        fused_adamw([*weights], gradients, visit.first, visit.second, params, step)

    def _moments(self, kind: str, names: list[str]) -> list[Tensor]:
        return [self._tensors[f"{kind}.{name}"] for name in names]

    def _bring(self, kind: str, names: list[str]) -> list[Tensor]:
        return [moment.to(self._device, non_blocking=True) for moment in self._moments(kind, names)]

    def _take_back(self, visit: _Visit, streams: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
        for kind, moments in (("exp_avg", visit.first), ("exp_avg_sq", visit.second)):
            for host, moment in zip(self._moments(kind, visit.names), moments, strict=True):
                host.copy_(moment, non_blocking=True)
                for stream in streams:
                    moment.record_stream(stream)

    def _batches(self) -> Iterator[list[str]]:
        names: list[str] = []
        elements = 0
        for name, parameter in self._parameters.items():
            if names and elements + parameter.numel() > _BATCH_ELEMENTS:
                yield names
                names, elements = [], 0
            names.append(name)
            elements += parameter.numel()
        yield names
