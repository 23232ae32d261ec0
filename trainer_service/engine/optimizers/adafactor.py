"""Adafactor (arXiv 1804.04235, algorithms 4 and 5), without momentum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.types import AdafactorParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of


class Adafactor(Optimizer[AdafactorParams]):
    """Keeps the row means, [m], and column means, [n], of a matrix's second moment, [m, n].

    For other weights it keeps the whole second moment.
    """

    workspace = 3

    def __init__(self, parameters: Parameters, params: AdafactorParams) -> None:
        super().__init__(parameters, params)
        matrices = {name: weight for name, weight in parameters.items() if weight.dim() > 1}
        self._add_state("row", {name: matrix[..., 0] for name, matrix in matrices.items()})
        self._add_state("column", {name: matrix[..., 0, :] for name, matrix in matrices.items()})
        self._add_state("exp_avg_sq", {name: weight for name, weight in parameters.items() if name not in matrices})

    def learning_rate(self, params: AdafactorParams, step: int) -> float:
        """Return the learning rate, at most 1 / sqrt(step) with relative_step (section 8 of the paper)."""
        return min(params.learning_rate, 1 / math.sqrt(step)) if params.relative_step else params.learning_rate

    def _update(self, params: AdafactorParams, step: int) -> None:
        rate, kept = self.learning_rate(params, step), 1.0 - step**-params.decay_exponent
        for name, weight in self._parameters.items():
            update = self._inverse_root(name, gradient_of(weight), params.eps1, kept).mul_(gradient_of(weight))
            if params.clip_threshold > 0:
                update.div_((_rms(update) / params.clip_threshold).clamp_(min=1.0))
            own_rate = rate * (_rms(weight).clamp_(min=params.eps2) if params.scale_parameter else 1.0)
            weight.mul_(1.0 - own_rate * params.weight_decay).sub_(update.mul_(own_rate))

    def _inverse_root(self, name: str, gradient: Tensor, eps: float, kept: float) -> Tensor:
        """Update the second moment with the gradient and return it to the power of -1/2, in the gradient's shape."""
        square = gradient.square().add_(eps)
        if f"exp_avg_sq.{name}" in self._tensors:
            return self._tensors[f"exp_avg_sq.{name}"].lerp_(square, 1.0 - kept).rsqrt()
        row = self._tensors[f"row.{name}"].lerp_(square.mean(-1), 1.0 - kept)
        column = self._tensors[f"column.{name}"].lerp_(square.mean(-2), 1.0 - kept)
        # Divide each factor before multiplying them: the product of two small squares underflows float32.
        by_row = (row / row.mean(-1, keepdim=True)).rsqrt_()
        return torch.mul(by_row[..., None], column.rsqrt()[..., None, :], out=square)


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(tensor.numel())
