"""Optimizers by name, with their settings for one step. The names match the oneof OptimStepRequest.optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from paceline.errors import InvalidArgument
from paceline.types.hints import hinted_fields

_hinted = hinted_fields(
    lr="learning_rate=...",
    betas="beta1=... and beta2=...",
    epsilon="eps=...",
    grad_clip="grad_clip_norm=...",
    max_grad_norm="grad_clip_norm=...",
)


@_hinted
@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of AdamW for one step (arXiv 1711.05101). The defaults are those of Tinker's API."""

    learning_rate: float = 1e-4
    """Step size."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-12
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies weights by 1 - learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Scale the gradient down to this norm; 0 is off."""


@_hinted
@dataclass(frozen=True, slots=True)
class Adam8bitParams(AdamParams):
    """Settings of AdamW with 8-bit moments (arXiv 2110.02861)."""


@_hinted
@dataclass(frozen=True, slots=True)
class AdamCpuParams(AdamParams):
    """Settings of AdamW with its moments in host memory; takes the same steps as AdamW."""


@_hinted
@dataclass(frozen=True, slots=True)
class AdafactorParams:
    """Settings of Adafactor for one step (arXiv 1804.04235, algorithms 4 and 5), without momentum."""

    learning_rate: float = 1e-3
    """Step size."""
    decay_exponent: float = 0.8
    """Step t keeps 1 - t^-decay_exponent of the second moment."""
    eps1: float = 1e-30
    """Added to the squared gradient."""
    eps2: float = 1e-3
    """Lower bound of a weight's root mean square, with scale_parameter."""
    clip_threshold: float = 1.0
    """Scale a weight's update down to this root mean square; 0 is off."""
    scale_parameter: bool = False
    """Multiply the learning rate by each weight's root mean square."""
    relative_step: bool = False
    """Use min(learning_rate, 1 / sqrt(step)) as the learning rate; the paper sets learning_rate to 1e-2."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies weights by 1 - learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Scale the gradient down to this norm; 0 is off."""


@_hinted
@dataclass(frozen=True, slots=True)
class ApolloParams:
    """Settings of APOLLO for one step (arXiv 2412.05270), with a learning rate per channel."""

    learning_rate: float = 1e-3
    """Step size."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies weights by 1 - learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Scale the gradient down to this norm; 0 is off."""
    rank: int = 256
    """Rank of the projection, capped at the smaller side of each matrix."""
    scale: float = 1.0
    """Updates are multiplied by the square root of this."""
    update_interval: int = 200
    """Number of steps after which the projection is redrawn."""
    norm_growth_limit: float = 1.01
    """Largest growth of an update's norm from step to step; 0 is off."""
    seed: int = 0
    """Seed of the projections."""


@_hinted
@dataclass(frozen=True, slots=True)
class ApolloMiniParams:
    """Settings of APOLLO-Mini for one step (arXiv 2412.05270), with rank 1 and a learning rate per matrix."""

    learning_rate: float = 1e-3
    """Step size."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies weights by 1 - learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Scale the gradient down to this norm; 0 is off."""
    scale: float = 128.0
    """Updates are multiplied by the square root of this."""
    update_interval: int = 200
    """Number of steps after which the projection is redrawn."""
    norm_growth_limit: float = 1.01
    """Largest growth of an update's norm from step to step; 0 is off."""
    seed: int = 0
    """Seed of the projections."""


OptimizerParams: TypeAlias = AdamParams | AdafactorParams | ApolloParams | ApolloMiniParams

OPTIMIZERS: Mapping[str, type[OptimizerParams]] = {
    "adamw": AdamParams,
    "adamw_8bit": Adam8bitParams,
    "adamw_cpu": AdamCpuParams,
    "adafactor": AdafactorParams,
    "apollo": ApolloParams,
    "apollo_mini": ApolloMiniParams,
}
"""The class of each optimizer's settings."""


def optimizer_name(params: OptimizerParams) -> str:
    """Return the name of the optimizer that `params` configure. Raises InvalidArgument for anything else."""
    for name, kind in OPTIMIZERS.items():
        if type(params) is kind:
            return name
    classes = ", ".join(kind.__name__ for kind in OPTIMIZERS.values())
    raise InvalidArgument.of_type(
        params, f"the settings of an optimizer, an instance of one of {classes}", "optim_params"
    )
