"""What optimizers share: the base class, which keeps state for each weight by name, and the norm of a gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.errors import NonFiniteGradient
from paceline.types import OptimizerParams

P = TypeVar("P", bound=OptimizerParams)

Parameters = Mapping[str, nn.Parameter]
"""float32 weights by name."""


class Optimizer(ABC, Generic[P]):
    """State of one optimizer over a run's weights. Each step has its own settings."""

    workspace: ClassVar[int] = 0
    """Temporary tensors of the largest weight's size that a step allocates."""

    def __init__(self, parameters: Parameters, params: P) -> None:
        """Create an optimizer without history for float32 `parameters`; `params` are the settings of its first step."""
        self.params = params
        """Settings of the last step."""
        self._parameters = parameters
        self._largest = max(parameters.values(), key=lambda parameter: parameter.numel())
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All state except the number of steps, named <kind>.<weight>; not a copy."""
        return self._tensors

    @torch.no_grad()
    def step(self, params: P, step: int, norm: float) -> float:
        """Take the run's step number `step`, from 1, with the gradient in the parameters, whose norm is `norm`.

        Returns the learning rate. The gradient is clipped in place. If memory runs out, it does so before weights or
        state change.
        """
        self.reserve()
        if params.grad_clip_norm > 0:
            clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, torch.tensor(norm))
        self.update(params, step)
        return self.learning_rate(params, step)

    @torch.no_grad()
    def update(self, params: P, step: int) -> None:
        """Take a step with a gradient that is already clipped, in memory that is already reserved."""
        self._update(params, step)
        self.params = params

    def learning_rate(self, params: P, step: int) -> float:
        """Return the learning rate of a step, before any per-weight scaling."""
        del step
        return params.learning_rate

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state with tensors of the same names, shapes and dtypes."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    @abstractmethod
    def _update(self, params: P, step: int) -> None:
        """Update weights and state with the gradient, which is already clipped."""

    def reserve(self) -> None:
        """Run out of memory now if the next step would. The allocator keeps the memory freed here for that step."""
        torch.empty(self.workspace * self._largest.numel(), device=self._largest.device)

    def _add_state(self, kind: str, like: Mapping[str, Tensor]) -> None:
        self._tensors |= {f"{kind}.{name}": torch.zeros_like(tensor.detach()) for name, tensor in like.items()}


AnyOptimizer = Optimizer[Any]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a weight's gradient; a run that takes a step has one for each weight."""
    return cast("Tensor", parameter.grad)


def batches(parameters: Mapping[str, Tensor], elements: int) -> Iterator[list[str]]:
    """Split weights, in order, into batches of at most `elements`; a larger weight is a batch of its own."""
    names: list[str] = []
    count = 0
    for name, parameter in parameters.items():
        if names and count + parameter.numel() > elements:
            yield names
            names, count = [], 0
        names.append(name)
        count += parameter.numel()
    yield names


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the Euclidean norm of the whole gradient. Raises NonFiniteGradient."""
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]).item()
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            "the gradient or its norm is NaN or infinite, and was dropped; look at the batch's logprobs, advantages "
            "and weights."
        )
    return norm
