"""Encode and decode optimizers: the member of OptimStepRequest that is set is the optimizer, with its settings."""

from __future__ import annotations

from dataclasses import asdict

from paceline.errors import MissingField
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.optimizers import OPTIMIZERS, OptimizerParams, optimizer_name


def optimizer_to_proto(params: OptimizerParams) -> pb.OptimStepRequest:
    """Encode an optimizer and all of its settings, as a request that names no run yet."""
    request = pb.OptimStepRequest()
    member = getattr(request, optimizer_name(params))
    member.SetInParent()
    for setting, value in asdict(params).items():
        setattr(member, setting, value)
    return request


def optimizer_from_proto(request: pb.OptimStepRequest) -> OptimizerParams:
    """Decode an optimizer and its settings; unset ones keep their defaults. Raises MissingField."""
    name = request.WhichOneof("optimizer")
    if name is None:
        raise MissingField("is not set; name the optimizer", field="adamw")
    return OPTIMIZERS[name](**{setting.name: value for setting, value in getattr(request, name).ListFields()})
