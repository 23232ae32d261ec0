"""Weights and gradients for tests of the optimizers, and settings for each that all have an effect."""

from __future__ import annotations

import torch
from torch import nn

from paceline.types import (
    AdafactorParams,
    Adam8bitParams,
    AdamCpuParams,
    AdamParams,
    ApolloMiniParams,
    ApolloParams,
)
from trainer_service.engine.optimizers.make import make_optimizer

COMMON = {"learning_rate": 0.02, "weight_decay": 0.1, "grad_clip_norm": 0.5}
BETAS = {"beta1": 0.8, "beta2": 0.9}
PARAMS = {
    "adamw": AdamParams(**COMMON, **BETAS, eps=1e-3),
    "adamw_8bit": Adam8bitParams(**COMMON, **BETAS, eps=1e-3),
    "adamw_cpu": AdamCpuParams(**COMMON, **BETAS, eps=1e-3),
    "adafactor": AdafactorParams(**COMMON, decay_exponent=0.7, eps1=1e-20, eps2=1e-2, clip_threshold=0.6),
    "apollo": ApolloParams(
        **COMMON, **BETAS, eps=1e-3, rank=3, scale=2.0, update_interval=2, norm_growth_limit=1.1, seed=7
    ),
    "apollo_mini": ApolloMiniParams(
        **COMMON, **BETAS, eps=1e-3, scale=9.0, update_interval=2, norm_growth_limit=1.1, seed=7
    ),
}
SHAPES = {"high": (12, 7), "wide": (5, 90), "flat": (6,)}


def make_weights(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def make_gradients(step, shapes=SHAPES):
    """Make gradients whose size changes from step to step; at step 1 one weight's is 0, as that of LoRA's A is."""
    generator = torch.Generator().manual_seed(100 + step)
    size = (1.0, 30.0, 0.2, 5.0, 2.0)[step % 5]
    gradients = {name: torch.randn(shape, generator=generator) * size for name, shape in shapes.items()}
    if step == 1:
        gradients["wide"].zero_()
    return gradients


def norm_of(gradients):
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()


def clipped(gradients, limit=COMMON["grad_clip_norm"]):
    """Return the gradients in float64, scaled down to a norm of at most `limit`."""
    factor = min(1.0, limit / norm_of(gradients))
    return {name: gradient.double() * factor for name, gradient in gradients.items()}


def step_with(optimizer, weights, params, step):
    gradients = make_gradients(step)
    for name, weight in weights.items():
        weight.grad = gradients[name].to(weight.device)
    return optimizer.step(params, step, norm_of(gradients))


def trained(params, steps):
    """Return weights after some steps of an optimizer, and the optimizer."""
    weights = make_weights()
    optimizer = make_optimizer(weights, params)
    for step in range(1, steps + 1):
        step_with(optimizer, weights, params, step)
    return weights, optimizer
