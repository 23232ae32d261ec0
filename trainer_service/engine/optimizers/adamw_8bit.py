"""AdamW with moments in 8 bits: a scale for each block, and the dynamic map of arXiv 2110.02861."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.types import AdamParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of

_BLOCK = 256
"""Elements that share a scale. The paper uses 2048; in smaller blocks a large element costs its neighbours less."""
_EXPONENTS = 7
"""Powers of ten that the map spans."""


class AdamW8bit(Optimizer[AdamParams]):
    """Keeps one byte for each moment of each element, and a float32 scale for each block of them.

    For one weight after another, the moments are unpacked, updated in float32, packed again, and used for the step.
    """

    workspace = 10

    def __init__(self, parameters: Parameters, params: AdamParams) -> None:
        super().__init__(parameters, params)
        device = self._largest.device
        self.maps = {kind: BlockMap(device, signed=kind == "exp_avg") for kind in ("exp_avg", "exp_avg_sq")}
        for kind in self.maps:
            for name, weight in parameters.items():
                self._tensors[f"{kind}.{name}"] = torch.zeros_like(weight, dtype=torch.uint8)
                self._tensors[f"{kind}_scale.{name}"] = weight.new_zeros(-(-weight.numel() // _BLOCK))

    def _update(self, params: AdamParams, step: int) -> None:
        for name, weight in self._parameters.items():
            gradient = gradient_of(weight)
            first, second = (
                kept.unpack(self._tensors[f"{kind}.{name}"], self._tensors[f"{kind}_scale.{name}"])
                for kind, kept in self.maps.items()
            )
            first.lerp_(gradient, 1.0 - params.beta1)
            second.mul_(params.beta2).addcmul_(gradient, gradient, value=1.0 - params.beta2)
            for moment, (kind, kept) in zip((first, second), self.maps.items(), strict=True):
                kept.pack(moment, self._tensors[f"{kind}.{name}"], self._tensors[f"{kind}_scale.{name}"])
            root = second.sqrt_().div_(math.sqrt(1.0 - params.beta2**step)).add_(params.eps)
            weight.mul_(1.0 - params.learning_rate * params.weight_decay)
            weight.addcdiv_(first, root, value=-params.learning_rate / (1.0 - params.beta1**step))


class BlockMap:
    """Rounds each element to the nearest of 256 values times the largest magnitude in its block.

    A value is a power of ten from 1 down to 1e-6 times a fraction of 0.1 to 1, with half as many fractions at each
    lower power; 0 and 1 are values too. Small elements have small absolute errors, large ones small relative errors: at
    most half the map's widest gap, 0.0071 of the scale if signed and 0.0036 if not. An unsigned map never rounds an
    element above 0 to 0, because second moments are divisors.
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        values = _dynamic_map(signed=signed)
        middles = (values[1:] + values[:-1]) / 2
        if not signed:
            middles[0] = 0.0
        self.values = values.to(device)
        self._first_codes = _first_codes(middles).to(device)
        self._middles = torch.cat([middles, torch.tensor([torch.inf])]).to(device)

    def pack(self, tensor: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round a float32 tensor into `codes`, uint8 of its shape, and `scales`, float32, one for each block."""
        blocks = _blocks(tensor)
        scales.copy_(blocks.abs().amax(1))
        shares = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).flatten()[: tensor.numel()]
        first = self._first_codes.index_select(0, (shares.view(torch.int32) >> 16) & 0xFFFF)
        codes.copy_((first + (shares > self._middles.index_select(0, first))).view_as(codes))

    def unpack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the float32 tensor that `pack` rounded to `codes` and `scales`."""
        values = _blocks(self.values.index_select(0, codes.flatten().int())) * scales[:, None]
        return values.flatten()[: codes.numel()].view(codes.shape)


def _dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of the map in ascending order, float32."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for power in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2 ** (power + (not signed)) + 1, dtype=torch.float64)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (power + 1 - _EXPONENTS)
        values += [means, -means] if signed else [means]
    return torch.cat(values).sort().values.float()


def _first_codes(middles: Tensor) -> Tensor:
    """Return, for each of the 65,536 leading byte pairs, the code of the lowest float32 that starts with it, int32.

    Numbers with the same first two bytes differ by less than a 128th, less than neighbouring values of the map do, so
    each has this code or the next. One comparison replaces a search.
    """
    bits = torch.arange(1 << 16) << 16
    bits = torch.where(bits >= 1 << 31, (bits | 0xFFFF) - (1 << 32), bits)
    return torch.bucketize(bits.to(torch.int32).view(torch.float32).nan_to_num(), middles, out_int32=True)


def _blocks(tensor: Tensor) -> Tensor:
    return pad(tensor.flatten(), (0, -tensor.numel() % _BLOCK)).view(-1, _BLOCK)
