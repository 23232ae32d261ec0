"""Create optimizers from their settings."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import OptimizerChanged
from paceline.types import OptimizerParams
from paceline.types.optimizers import optimizer_name
from trainer_service.engine.optimizers.adafactor import Adafactor
from trainer_service.engine.optimizers.adamw import AdamW, AdamWCpu
from trainer_service.engine.optimizers.adamw_8bit import AdamW8bit
from trainer_service.engine.optimizers.apollo import Apollo
from trainer_service.engine.optimizers.base import AnyOptimizer, Parameters
from trainer_service.engine_link.optimizer_specs import spec_of

_CLASSES: Mapping[str, type[AnyOptimizer]] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "adamw_cpu": AdamWCpu,
    "adafactor": Adafactor,
    "apollo": Apollo,
    "apollo_mini": Apollo,
}


def make_optimizer(parameters: Parameters, params: OptimizerParams) -> AnyOptimizer:
    """Create an optimizer without history for weights on one device."""
    return _CLASSES[optimizer_name(params)](parameters, params)


def check_same(optimizer: AnyOptimizer, params: OptimizerParams) -> None:
    """Check that a step with `params` can continue from an optimizer's state. Raises OptimizerChanged."""
    before, after = spec_of(optimizer.params), spec_of(params)
    metadata = {"optimizer": before.name}
    if before is not after:
        message = f"the run has state of {before.name}; keep using it, or load only the weights to start over."
        raise OptimizerChanged(message, field=after.name, metadata=metadata)
    if setting := before.changed(optimizer.params, params):
        kept = getattr(optimizer.params, setting)
        message = f"is not the {kept} of the run's state; send that, or load only the weights to start over."
        raise OptimizerChanged(message, field=f"{after.name}.{setting}", metadata=metadata)
