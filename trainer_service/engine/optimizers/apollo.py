"""APOLLO and APOLLO-Mini (arXiv 2412.05270): the gradient, scaled as Adam would scale it in a random low-rank space."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from paceline.types import ApolloMiniParams, ApolloParams
from trainer_service.engine.optimizers.base import Optimizer, Parameters, gradient_of

_SMALLEST_NORM = 1e-8
"""Added to norms before dividing by them."""

Params = ApolloParams | ApolloMiniParams


class Apollo(Optimizer[Params]):
    """Algorithm 1 of the paper, for a gradient G of shape [L, S]; G is transposed first if L < S.

    R = G P with P from N(0, 1/r), shape [S, r]; M and V are Adam's moments of R, and R' = M / (sqrt(V) + eps). G is
    multiplied by |R'| / |R|, per row (APOLLO) or as a whole (APOLLO-Mini); then the growth of its norm is limited as in
    the paper. P is drawn again from the seed, the weight's name and the number of the draw whenever it is needed, so it
    is not stored. Weights that are not matrices are stepped by Adam.
    """

    workspace = 6

    def __init__(self, parameters: Parameters, params: Params) -> None:
        super().__init__(parameters, params)
        self._rank, self._norm_over = 1, [0, 1]
        if isinstance(params, ApolloParams):
            self._rank, self._norm_over = params.rank, [1]
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, weight in parameters.items():
                self._tensors[f"{kind}.{name}"] = weight.new_zeros(self._moment_shape(weight.shape))
        self._add_state("norm", {name: weight[0, 0] for name, weight in parameters.items() if weight.dim() == 2})

    def _update(self, params: Params, step: int) -> None:
        draw = (step - 1) // params.update_interval
        rate = params.learning_rate * math.sqrt(1.0 - params.beta2**step) / (1.0 - params.beta1**step)
        for name, weight in self._parameters.items():
            gradient = gradient_of(weight)
            if weight.dim() != 2:
                weight.sub_(self._adam(name, gradient, params), alpha=rate)
            elif weight.shape[0] >= weight.shape[1]:
                weight.sub_(self._scaled(name, gradient, params, draw), alpha=rate)
            else:
                weight.sub_(self._scaled(name, gradient.T, params, draw).T, alpha=rate)
            weight.mul_(1.0 - params.learning_rate * params.weight_decay)

    def _scaled(self, name: str, gradient: Tensor, params: Params, draw: int) -> Tensor:
        """Scale a gradient of shape [L, S], limit its norm, and multiply by sqrt(scale)."""
        projected = gradient @ self.projection(name, gradient.shape[1], params.seed, draw)
        moved = self._adam(name, projected, params)
        norms = [torch.linalg.vector_norm(side, dim=self._norm_over, keepdim=True) for side in (moved, projected)]
        scaled: Tensor = gradient * (norms[0] / (norms[1] + _SMALLEST_NORM))
        factor = self._limit(name, torch.linalg.vector_norm(scaled), params)
        return scaled.mul_(factor * math.sqrt(params.scale))

    def _limit(self, name: str, norm: Tensor, params: Params) -> Tensor:
        """Return the factor that keeps the norm within its limit, and store the resulting norm."""
        last = self._tensors[f"norm.{name}"]
        # After a step with a zero gradient, as of LoRA's A at first, there is no norm to grow from.
        bound = torch.where(last > 0, last * (params.norm_growth_limit or math.inf), math.inf)
        factor = torch.where(norm > bound, bound / norm, 1.0)
        last.copy_(norm * factor)
        return factor

    def _adam(self, name: str, gradient: Tensor, params: Params) -> Tensor:
        """Update the moments with a gradient and return their quotient, without bias correction."""
        first = self._tensors[f"exp_avg.{name}"].lerp_(gradient, 1.0 - params.beta1)
        second = self._tensors[f"exp_avg_sq.{name}"].mul_(params.beta2)
        second.addcmul_(gradient, gradient, value=1.0 - params.beta2)
        return first / second.sqrt().add_(params.eps)

    def projection(self, name: str, side: int, seed: int, draw: int) -> Tensor:
        """Draw P, shape [side, r]; the same arguments give the same P on the same kind of device."""
        moments = self._tensors[f"exp_avg.{name}"]
        rank = moments.shape[1]
        digest = hashlib.blake2b(f"{seed} {draw} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(moments.device).manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(side, rank, generator=generator, device=moments.device).div_(math.sqrt(rank))

    def _moment_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return (max(shape), min(self._rank, *shape)) if len(shape) == 2 else shape
