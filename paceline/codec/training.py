"""Encode and decode the inputs and outputs of training."""

from __future__ import annotations

from paceline import errors
from paceline.codec.tensors import FLOATS, INTEGERS, MASKS, tensor_from_proto, tensor_to_proto, token_ids_from_proto
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import (
    Datum,
    ForwardBackwardSpec,
    FullParameters,
    LoraConfig,
    Reduction,
    RunParameters,
    WeightStorage,
)
from paceline.types.training import MASK_INPUTS, MULTI_TARGET_INPUTS, TOKEN_INPUTS, Array
from paceline.types.v1 import datum_pb2, full_pb2, lora_pb2

_ONE, _ONE_OR_TWO = range(1, 2), range(1, 3)


def datum_to_proto(datum: Datum, field: str = "data") -> datum_pb2.Datum:
    """Encode a datum; `field` is its place in the request, for errors."""
    inputs = {
        name: tensor_to_proto(values, f"{field}.loss_inputs[{name}]") for name, values in datum.loss_inputs.items()
    }
    return datum_pb2.Datum(model_input=tensor_to_proto(datum.model_input, f"{field}.model_input"), loss_inputs=inputs)


def datum_from_proto(message: datum_pb2.Datum, field: str) -> Datum:
    """Decode a datum; `field` is its place in the request, for errors."""
    inputs = {
        name: tensor_from_proto(tensor, f"{field}.loss_inputs[{name}]", _dtypes(name), ndim=_dimensions(name))
        for name, tensor in message.loss_inputs.items()
    }
    return Datum(token_ids_from_proto(message.model_input, f"{field}.model_input"), inputs)


def _dtypes(name: str) -> frozenset[str]:
    if name in TOKEN_INPUTS:
        return INTEGERS
    return MASKS if name in MASK_INPUTS else FLOATS


def _dimensions(name: str) -> range:
    return _ONE_OR_TWO if name in MULTI_TARGET_INPUTS else _ONE


def output_to_proto(output: dict[str, Array]) -> datum_pb2.DatumOutput:
    """Encode the outputs of one datum."""
    return datum_pb2.DatumOutput(tensors={name: tensor_to_proto(values) for name, values in output.items()})


def output_from_proto(message: datum_pb2.DatumOutput, field: str) -> dict[str, Array]:
    """Decode the outputs of one datum."""
    return {
        name: tensor_from_proto(tensor, f"{field}.{name}", FLOATS, ndim=_ONE_OR_TWO)
        for name, tensor in message.tensors.items()
    }


def spec_to_proto(run_id: str, spec: ForwardBackwardSpec) -> trainer_pb.ForwardBackwardRequest:
    """Encode what to compute for a batch, without the batch."""
    return trainer_pb.ForwardBackwardRequest(
        run_id=run_id,
        loss_fn=spec.loss_fn,
        loss_fn_config=spec.loss_fn_config,
        reduction=trainer_pb.Reduction.ValueType(spec.reduction.value),
        reduction_count=spec.reduction_count,
        forward_only=spec.forward_only,
        refuse_non_finite=spec.refuse_non_finite,
    )


def spec_from_proto(request: trainer_pb.ForwardBackwardRequest) -> ForwardBackwardSpec:
    """Decode what to compute for a batch. Raises InvalidArgument for an unknown reduction."""
    return ForwardBackwardSpec(
        loss_fn=request.loss_fn,
        loss_fn_config=dict(request.loss_fn_config),
        reduction=_reduction_from_proto(request.reduction),
        reduction_count=request.reduction_count if request.HasField("reduction_count") else None,
        forward_only=request.forward_only,
        refuse_non_finite=request.refuse_non_finite,
    )


def _reduction_from_proto(value: trainer_pb.Reduction.ValueType) -> Reduction:
    if value not in trainer_pb.Reduction.values():
        known = ", ".join(member.name for member in Reduction)
        raise errors.InvalidArgument(f"is {value}; send one of {known}", field="reduction")
    return Reduction(value or Reduction.SUM.value)


def lora_config_to_proto(config: LoraConfig) -> lora_pb2.LoraConfig:
    """Encode an adapter's configuration."""
    message = lora_pb2.LoraConfig(
        rank=config.rank,
        dropout=config.dropout,
        seed=config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        layers=config.layers,
        use_rslora=config.use_rslora,
        target_modules=config.target_modules,
    )
    if config.alpha is not None:
        message.alpha = config.alpha
    return message


def lora_config_from_proto(message: lora_pb2.LoraConfig) -> LoraConfig:
    """Decode an adapter's configuration, with all defaults filled in."""
    return LoraConfig(
        rank=message.rank,
        alpha=message.alpha if message.HasField("alpha") else 2.0 * message.rank,
        dropout=message.dropout,
        seed=message.seed,
        train_attn=message.train_attn if message.HasField("train_attn") else True,
        train_mlp=message.train_mlp if message.HasField("train_mlp") else True,
        train_unembed=message.train_unembed,
        layers=tuple(message.layers),
        use_rslora=message.use_rslora,
        target_modules=tuple(message.target_modules),
    )


def put_parameters(message: trainer_pb.CreateRunRequest | trainer_pb.Run, parameters: RunParameters) -> None:
    """Write the parameters that a run trains into a message."""
    if isinstance(parameters, LoraConfig):
        message.lora.CopyFrom(lora_config_to_proto(parameters))
    else:
        storage = full_pb2.WeightStorage.ValueType(parameters.storage.value)
        message.full.CopyFrom(full_pb2.FullParameters(storage=storage, seed=parameters.seed))


def parameters_from_proto(message: trainer_pb.CreateRunRequest | trainer_pb.Run) -> RunParameters:
    """Read the parameters that a run trains, with all defaults filled in. Raises MissingField, InvalidArgument."""
    if message.HasField("lora"):
        return lora_config_from_proto(message.lora)
    if not message.HasField("full"):
        raise errors.MissingField("is not set; say what the run trains", field="lora")
    storage = message.full.storage or WeightStorage.FLOAT32.value
    if storage not in full_pb2.WeightStorage.values():
        known = ", ".join(member.name for member in WeightStorage)
        raise errors.InvalidArgument(f"is {storage}; send one of {known}", field="full.storage")
    return FullParameters(WeightStorage(storage), message.full.seed)
