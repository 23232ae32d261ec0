"""AdamW (arXiv 1711.05101) in torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from paceline.types import AdamParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of


class AdamW(Optimizer[AdamParams]):
    """All weights at once, moments beside them."""

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        self._add_state("exp_avg", parameters)
        self._add_state("exp_avg_sq", parameters)

    def _update(self, params: AdamParams, step: int) -> None:
        weights = list(self._parameters.values())
        first = [self._tensors[f"exp_avg.{name}"] for name in self._parameters]
        second = [self._tensors[f"exp_avg_sq.{name}"] for name in self._parameters]
        fused_adamw(weights, [gradient_of(weight) for weight in weights], first, second, params, step)


def fused_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    params: AdamParams,
    step: int,
) -> None:
    """Take step number `step` on weights and their moments, all of them on one device and changed in place."""
    # The kernel counts the steps up by itself, in a tensor for each weight.
    counts = torch.full((len(weights),), float(step - 1), device=weights[0].device).unbind()
    adamw(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        list(counts),
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
