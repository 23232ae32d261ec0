"""Tensors in 8 bits: a scale for each block, and the dynamic map of arXiv 2110.02861 (sections 1.2 and 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Elements that share a scale. The paper has 2048; smaller ones lose less to a large neighbour."""

_EXPONENTS = 7
"""Powers of ten that the map spans."""


class BlockMap:
    """Rounds each element to the nearest of 256 values times the largest magnitude in its block.

    A value is a power of ten from 1 down to 1e-6 times a fraction of 0.1 to 1, with half as many fractions at each
    power below; and 0 and 1. Small elements have small absolute errors, large ones small relative errors: at most half
    the map's widest gap, 0.0071 of the scale where signed and 0.0036 where not. Without sign, what is above 0 is never
    rounded to 0, since a second moment is divided by.
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        self.values = dynamic_map(signed=signed).to(device)
        self._middles = (self.values[1:] + self.values[:-1]) / 2
        if not signed:
            self._middles[0] = 0.0

    def pack(self, tensor: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round a float32 tensor into `codes`, uint8 of its shape, and `scales`, float32, one for each block."""
        blocks = _blocks(tensor)
        scales.copy_(blocks.abs().amax(1))
        shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        indices = torch.bucketize(shares, self._middles, out_int32=True)
        codes.copy_(indices.flatten()[: tensor.numel()].view_as(codes))

    def unpack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return what `pack` kept, float32."""
        values = _blocks(self.values[codes.int()]) * scales[:, None]
        return values.flatten()[: codes.numel()].view(codes.shape)


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of the map in ascending order, float32."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for power in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2 ** (power + (not signed)) + 1, dtype=torch.float64)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (power + 1 - _EXPONENTS)
        values += [means, -means] if signed else [means]
    return torch.cat(values).sort().values.float()


def count_blocks(tensor: Tensor) -> int:
    """Count the scales that a tensor needs."""
    return -(-tensor.numel() // BLOCK)


def _blocks(tensor: Tensor) -> Tensor:
    return pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
