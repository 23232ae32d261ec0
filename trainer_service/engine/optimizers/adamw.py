"""AdamW (arXiv 1711.05101) in torch's fused kernel, with the moments on the weights' device or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.types import AdamParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, batches, gradient_of

BATCH_ELEMENTS = 1 << 24
"""Elements of a batch, whose moments take 128 MiB; a larger weight is a batch of its own."""
_BATCHES_AT_A_TIME = 3
"""One is copied in, one is updated and one is copied back."""


class AdamW(Optimizer[AdamParams]):
    """Steps all weights at once, with the moments on the weights' device."""

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        self._add_state("exp_avg", parameters)
        self._add_state("exp_avg_sq", parameters)
        self._weights = list(parameters.values())
        self._first = [self._tensors[f"exp_avg.{name}"] for name in parameters]
        self._second = [self._tensors[f"exp_avg_sq.{name}"] for name in parameters]

    def _update(self, params: AdamParams, step: int) -> None:
        _fused_step(self._weights, self._first, self._second, params, step)


@dataclass(frozen=True, slots=True)
class _Moments:
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
            self._copy_in_stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._copy_back_stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        return self._tensors

    def reserve(self) -> None:
        if self._on_cuda:
            # The moments have their sizes between steps, when the weights may be empty.
            moments = {name: self._tensors[f"exp_avg.{name}"] for name in self._parameters}
            groups = batches(moments, BATCH_ELEMENTS)
            largest = max(sum(moments[name].numel() for name in names) for names in groups)
            with torch.cuda.stream(self._copy_in_stream):
                torch.empty(_BATCHES_AT_A_TIME, 2, largest, device=self._device)

    def _update(self, params: AdamParams, step: int) -> None:
        if self._on_cuda:
            self._update_in_batches(params, step)
        else:
            first, second = (self._moments(kind, self._parameters) for kind in ("exp_avg", "exp_avg_sq"))
            _fused_step(list(self._parameters.values()), first, second, params, step)

    def _update_in_batches(self, params: AdamParams, step: int) -> None:
        computing, returned = torch.cuda.current_stream(self._device), list[torch.cuda.Event]()
        self._copy_in_stream.wait_stream(computing)
        for names in batches(self._parameters, BATCH_ELEMENTS):
            if len(returned) > 1:
                returned[-2].synchronize()
            with torch.cuda.stream(self._copy_in_stream):
                moments = _Moments(names, self._copy_in("exp_avg", names), self._copy_in("exp_avg_sq", names))
            computing.wait_stream(self._copy_in_stream)
            _fused_step([self._parameters[name] for name in names], moments.first, moments.second, params, step)
            self._copy_back_stream.wait_stream(computing)
            with torch.cuda.stream(self._copy_back_stream):
                self._copy_back(moments, (computing, self._copy_back_stream))
                returned.append(self._copy_back_stream.record_event())
        # The next step must find the moments in host memory.
        computing.wait_stream(self._copy_back_stream)

    def _moments(self, kind: str, names: Iterable[str]) -> list[Tensor]:
        return [self._tensors[f"{kind}.{name}"] for name in names]

    def _copy_in(self, kind: str, names: list[str]) -> list[Tensor]:
        return [moment.to(self._device, non_blocking=True) for moment in self._moments(kind, names)]

    def _copy_back(self, moments: _Moments, streams: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
        for kind, batch in (("exp_avg", moments.first), ("exp_avg_sq", moments.second)):
            for host, moment in zip(self._moments(kind, moments.names), batch, strict=True):
                host.copy_(moment, non_blocking=True)
                for stream in streams:
                    moment.record_stream(stream)


def _fused_step(
    weights: Sequence[nn.Parameter], first: list[Tensor], second: list[Tensor], params: AdamParams, step: int
) -> None:
    """Take step number `step` on weights and their moments, in place; all tensors must be on one device."""
    count = torch.full((), float(step), device=weights[0].device)
    # Calls the kernel directly: torch.optim first groups the weights and counts each one's steps separately.
    torch._fused_adamw_(
        [*weights],
        [gradient_of(weight) for weight in weights],
        first,
        second,
        [],
        [count] * len(weights),
        amsgrad=False,
        maximize=False,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
