"""Any optimizer on bfloat16 weights: each step is in float32, and stochastic rounding converts its result back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.types import OptimizerParams
from trainer_service.engine.optimizers.base import AnyOptimizer, Optimizer, Parameters, batches, gradient_of
from trainer_service.engine.optimizers.make import make_optimizer

_PART_ELEMENTS = 1 << 24
"""Elements that are in float32 at the same time, with noise for each; a larger weight is a part of its own."""


@dataclass(frozen=True, slots=True)
class _Part:
    exact: dict[str, nn.Parameter]
    """float32 copies of bfloat16 weights, and the float32 weights themselves; empty between steps."""
    optimizer: AnyOptimizer
    """Optimizer of these weights."""


class RoundedOptimizer(Optimizer[OptimizerParams]):
    """Applies another optimizer to bfloat16 weights with float32 gradients, some of the weights at a time.

    A few weights may be float32; they are stepped in place. The order of the weights determines which numbers from
    `generator` each of them gets.
    """

    def __init__(self, parameters: Parameters, params: OptimizerParams, generator: torch.Generator) -> None:
        super().__init__(parameters, params)
        self.generator = generator
        self._parts = [self._make_part(names, params) for names in batches(parameters, _PART_ELEMENTS)]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: tensor for part in self._parts for name, tensor in part.optimizer.tensors.items()}

    def learning_rate(self, params: OptimizerParams, step: int) -> float:
        return self._parts[0].optimizer.learning_rate(params, step)

    def reserve(self) -> None:
        elements, largest = max(
            ((sum(self._parameters[name].numel() for name in part.exact), part) for part in self._parts),
            key=lambda pair: pair[0],
        )
        workspace = largest.optimizer.workspace * self._largest.numel()
        buffer = torch.empty(2 * elements + workspace, device=self._largest.device)
        largest.optimizer.reserve()  # what is not its workspace
        del buffer

    def _update(self, params: OptimizerParams, step: int) -> None:
        for part in self._parts:
            self._fill(part)
            part.optimizer.update(params, step)
            for name, exact in part.exact.items():
                if self._parameters[name].dtype is torch.bfloat16:
                    round_stochastically(exact.data, self._parameters[name].data, self.generator)
            _empty(part)

    def _make_part(self, names: list[str], params: OptimizerParams) -> _Part:
        exact = {name: nn.Parameter(self._parameters[name].detach().float()) for name in names}
        part = _Part(exact, make_optimizer(exact, params))
        _empty(part)
        return part

    def _fill(self, part: _Part) -> None:
        for name, exact in part.exact.items():
            exact.data = self._parameters[name].data.float()
            exact.grad = gradient_of(self._parameters[name])


def round_stochastically(exact: Tensor, target: Tensor, generator: torch.Generator) -> None:
    """Round float32 to one of the two nearest bfloat16, with probabilities that make the mean exact.

    bfloat16 is float32 without its last 16 bits. A uniform 16-bit number, added to the magnitude before they are cut,
    carries over with a probability equal to their share (arXiv 2010.06192, section 3). Changes `exact`.
    """
    noise = torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device)
    target.copy_(exact.view(torch.int32).add_(noise).bitwise_and_(-1 << 16).view(torch.float32))


def _empty(part: _Part) -> None:
    for exact in part.exact.values():
        exact.data, exact.grad = exact.data.new_empty(0), None
