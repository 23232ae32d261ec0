"""AdamW with moments in 8 bits, quantised in blocks (arXiv 2110.02861)."""

from __future__ import annotations

import math

import torch

from paceline.types import AdamParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of
from trainer_service.engine.optimizers.quantise import BlockMap, count_blocks


class AdamW8bit(Optimizer[AdamParams]):
    """Keeps one byte for each moment of each element, and a float32 scale for each block of them.

    For one weight after another, the moments are unpacked, updated in float32, packed again, and used for the step.
    """

    workspace = 10

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        device = self._largest.device
        self._maps = {kind: BlockMap(device, signed=kind == "exp_avg") for kind in ("exp_avg", "exp_avg_sq")}
        for kind in self._maps:
            for name, weight in parameters.items():
                self._tensors[f"{kind}.{name}"] = torch.zeros_like(weight, dtype=torch.uint8)
                self._tensors[f"{kind}_scale.{name}"] = weight.new_zeros(count_blocks(weight))

    def _update(self, params: AdamParams, step: int) -> None:
        for name, weight in self._parameters.items():
            gradient = gradient_of(weight)
            first, second = (
                kept.unpack(self._tensors[f"{kind}.{name}"], self._tensors[f"{kind}_scale.{name}"])
                for kind, kept in self._maps.items()
            )
            first.lerp_(gradient, 1.0 - params.beta1)
            second.mul_(params.beta2).addcmul_(gradient, gradient, value=1.0 - params.beta2)
            for moment, (kind, kept) in zip((first, second), self._maps.items(), strict=True):
                kept.pack(moment, self._tensors[f"{kind}.{name}"], self._tensors[f"{kind}_scale.{name}"])
            root = second.sqrt_().div_(math.sqrt(1.0 - params.beta2**step)).add_(params.eps)
            weight.mul_(1.0 - params.learning_rate * params.weight_decay)
            weight.addcdiv_(first, root, value=-params.learning_rate / (1.0 - params.beta1**step))
