"""AdamW (arXiv 1711.05101) on a run's float32 weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.errors import NonFiniteGradient
from paceline.types import AdamParams


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Make an optimizer without history. Each step brings its own settings."""
    return torch.optim.AdamW(list(parameters), lr=0.0, weight_decay=0.0, fused=True)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Measure the whole gradient's Euclidean norm. Raises NonFiniteGradient."""
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]).item()
    if not math.isfinite(norm):
        raise NonFiniteGradient(
            "the gradient held NaN or infinity and was dropped; look at the batch's logprobs, advantages and weights."
        )
    return norm


def apply_step(optimizer: torch.optim.AdamW, params: AdamParams, norm: float) -> None:
    """Clip the gradient, whose norm is `norm`, and take one step with `params`."""
    group = optimizer.param_groups[0]
    if params.grad_clip_norm > 0:
        clip_grads_with_norm_(group["params"], params.grad_clip_norm, torch.tensor(norm))
    group["lr"] = params.learning_rate
    group["betas"] = (params.beta1, params.beta2)
    group["eps"] = params.eps
    group["weight_decay"] = params.weight_decay
    optimizer.step()
