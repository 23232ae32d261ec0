"""Inputs and outputs of training."""

from __future__ import annotations

from paceline.codec.tensors import FLOATS, INTEGERS, MASKS, tensor_from_proto, tensor_to_proto, token_ids_from_proto
from paceline.types import Datum, LoraConfig
from paceline.types.training import MASK_INPUTS, TOKEN_INPUTS, Array
from paceline.types.v1 import datum_pb2, lora_pb2


def datum_to_proto(datum: Datum, field: str = "data") -> datum_pb2.Datum:
    """Encode a datum; `field` is its place in the request, for errors."""
    inputs = {
        name: tensor_to_proto(values, f"{field}.loss_inputs[{name}]") for name, values in datum.loss_inputs.items()
    }
    return datum_pb2.Datum(model_input=tensor_to_proto(datum.model_input, f"{field}.model_input"), loss_inputs=inputs)


def datum_from_proto(message: datum_pb2.Datum, field: str) -> Datum:
    """Decode a datum; `field` is its place in the request, for errors."""
    inputs = {
        name: tensor_from_proto(tensor, f"{field}.loss_inputs[{name}]", _dtypes(name))
        for name, tensor in message.loss_inputs.items()
    }
    return Datum(token_ids_from_proto(message.model_input, f"{field}.model_input"), inputs)


def _dtypes(name: str) -> frozenset[str]:
    if name in TOKEN_INPUTS:
        return INTEGERS
    return MASKS if name in MASK_INPUTS else FLOATS


def output_to_proto(output: dict[str, Array]) -> datum_pb2.DatumOutput:
    """Encode what one datum gave back."""
    return datum_pb2.DatumOutput(tensors={name: tensor_to_proto(values) for name, values in output.items()})


def output_from_proto(message: datum_pb2.DatumOutput, field: str) -> dict[str, Array]:
    """Decode what one datum gave back."""
    return {name: tensor_from_proto(tensor, f"{field}.{name}", FLOATS) for name, tensor in message.tensors.items()}


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
    )
    if config.alpha is not None:
        message.alpha = config.alpha
    return message


def lora_config_from_proto(message: lora_pb2.LoraConfig) -> LoraConfig:
    """Decode an adapter's configuration, every default filled in."""
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
    )
