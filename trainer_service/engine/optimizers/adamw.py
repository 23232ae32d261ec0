"""AdamW (arXiv 1711.05101) in torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.types import AdamParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of


class AdamW(Optimizer[AdamParams]):
    """Steps all weights at once, with the moments on the weights' device."""

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        self._add_state("exp_avg", parameters)
        self._add_state("exp_avg_sq", parameters)
        self._weights: list[Tensor] = list(parameters.values())
        self._first = [self._tensors[f"exp_avg.{name}"] for name in parameters]
        self._second = [self._tensors[f"exp_avg_sq.{name}"] for name in parameters]

    def _update(self, params: AdamParams, step: int) -> None:
        gradients = [gradient_of(weight) for weight in self._parameters.values()]
        fused_adamw(self._weights, gradients, self._first, self._second, params, step)


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    params: AdamParams,
    step: int,
) -> None:
    """Take step number `step` on weights and their moments, in place; all tensors must be on one device."""
    count = torch.full((), float(step), device=weights[0].device)
    # Calls the kernel directly: torch.optim first groups the weights and counts each one's steps separately.
    torch._fused_adamw_(
        weights,
        gradients,
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
