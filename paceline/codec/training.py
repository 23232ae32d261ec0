"""Encode and decode the inputs and outputs of training: tensors, datums, what to compute, parameters, optimizers.

A tensor is little-endian bytes with dtype and shape.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np

from paceline import errors
from paceline.codec.messages import make
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import (
    Datum,
    ForwardBackwardSpec,
    FullParameters,
    LoraConfig,
    OptimizerParams,
    Reduction,
    RunParameters,
    WeightStorage,
)
from paceline.types.optimizers import OPTIMIZERS, optimizer_name
from paceline.types.training import MASK_INPUTS, MULTI_TARGET_INPUTS, TOKEN_INPUTS, Array
from paceline.types.v1 import datum_pb2, full_pb2, lora_pb2, tensor_pb2

FLOATS: frozenset[str] = frozenset({"float32"})
INTEGERS: frozenset[str] = frozenset({"int32", "int64"})
MASKS: frozenset[str] = frozenset({"uint8"})

_NAMES: dict[int, str] = {
    tensor_pb2.DTYPE_FLOAT32: "float32",
    tensor_pb2.DTYPE_INT64: "int64",
    tensor_pb2.DTYPE_INT32: "int32",
    tensor_pb2.DTYPE_FLOAT16: "float16",
    tensor_pb2.DTYPE_UINT8: "uint8",
}
_LITTLE: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES.values()}
"""The dtypes of the wire's bytes, by name."""
_TO_WIRE: dict[np.dtype[Any], tuple[tensor_pb2.Dtype.ValueType, np.dtype[Any]]] = {
    dtype: (tensor_pb2.Dtype.ValueType(wire), _LITTLE[name])
    for wire, name in _NAMES.items()
    for dtype in (_LITTLE[name], _LITTLE[name].newbyteorder(">"))
}
"""The dtype on the wire, and that of its bytes, of an array's dtype in either byte order."""
_ONE, _ONE_OR_TWO = range(1, 2), range(1, 3)


def tensor_to_proto(array: Array, field: str = "", dtypes: Collection[str] = _LITTLE) -> tensor_pb2.Tensor:
    """Encode an array of any shape; for errors, `field` is its place in the request, which takes one of `dtypes`.

    Raises InvalidDtype for a dtype that the wire format does not have.
    """
    found = _TO_WIRE.get(array.dtype)
    if found is None:
        raise errors.InvalidDtype(
            f"dtype {array.dtype.name} cannot be sent; give {' or '.join(sorted(dtypes))}", field=field
        )
    wire, little = found
    return tensor_pb2.Tensor(dtype=wire, shape=array.shape, data=array.astype(little, copy=False).tobytes())


def tensor_from_proto(
    tensor: tensor_pb2.Tensor, field: str, dtypes: Collection[str], *, ndim: int | range = 1
) -> Array:
    """Decode a tensor without copying; the array is read-only. `ndim` is its number of dimensions, or their range.

    Raises InvalidDtype if its dtype is not among `dtypes`, InvalidShape if its shape is not allowed or does not match
    its bytes.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or name not in dtypes:
        raise errors.InvalidDtype(
            f"is {name or 'unspecified'}; send {' or '.join(sorted(dtypes))}", field=f"{field}.dtype"
        )
    shape = tuple(tensor.shape)
    allowed = range(ndim, ndim + 1) if isinstance(ndim, int) else ndim
    if len(shape) not in allowed or min(shape, default=0) < 0:
        wanted = " or ".join(map(str, allowed))
        raise errors.InvalidShape(
            f"is {list(shape)}; send {wanted} dimension(s), none negative", field=f"{field}.shape"
        )
    dtype = _LITTLE[name]
    data = tensor.data
    if prod(shape) * dtype.itemsize != len(data):
        raise errors.InvalidShape(
            f"holds {len(data)} bytes; shape {list(shape)} of {name} needs {prod(shape) * dtype.itemsize}",
            field=f"{field}.data",
        )
    return np.frombuffer(data, dtype).reshape(shape)


def token_ids_from_proto(tensor: tensor_pb2.Tensor, field: str) -> Array:
    """Decode token ids, int32 or int64, shape [N], N >= 1. Raises EmptyBatch if there are none."""
    tokens = tensor_from_proto(tensor, field, INTEGERS)
    if tokens.size == 0:
        raise errors.EmptyBatch("holds no token; send at least one", field=field)
    return tokens


def datum_to_proto(datum: Datum, field: str = "data") -> datum_pb2.Datum:
    """Encode a datum; `field` is its place in the request, for errors."""
    inputs = {
        name: tensor_to_proto(values, f"{field}.loss_inputs[{name}]", _dtypes(name))
        for name, values in datum.loss_fn_inputs.items()
    }
    model_input = tensor_to_proto(datum.model_input, f"{field}.model_input", INTEGERS)
    return make(datum_pb2.Datum, f"{field}.", model_input=model_input, loss_inputs=inputs)


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


def spec_to_proto(spec: ForwardBackwardSpec) -> trainer_pb.ForwardBackwardRequest:
    """Encode a spec as a request without data."""
    return make(
        trainer_pb.ForwardBackwardRequest,
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
    return make(
        lora_pb2.LoraConfig,
        "lora.",
        rank=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        seed=config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        layers=config.layers,
        use_rslora=config.use_rslora,
        target_modules=config.target_modules,
    )


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
        message.full.CopyFrom(make(full_pb2.FullParameters, "full.", storage=storage, seed=parameters.seed))


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


def optimizer_to_proto(params: OptimizerParams) -> trainer_pb.OptimStepRequest:
    """Encode an optimizer and all of its settings, as a request that names no run yet. Raises InvalidArgument."""
    request, name = trainer_pb.OptimStepRequest(), optimizer_name(params)
    member, settings = getattr(request, name), asdict(params)
    for setting, value in settings.items():
        if value is None:
            raise errors.MissingField("is None; leave it out for its default", field=f"{name}.{setting}")
    member.CopyFrom(make(type(member), f"{name}.", **settings))
    return request


def optimizer_from_proto(request: trainer_pb.OptimStepRequest) -> OptimizerParams:
    """Decode an optimizer and its settings; unset ones keep their defaults. Raises MissingField."""
    name = request.WhichOneof("optimizer")
    if name is None:
        raise errors.MissingField("is not set; name the optimizer", field="adamw")
    return OPTIMIZERS[name](**{setting.name: value for setting, value in getattr(request, name).ListFields()})
