"""Encode and decode model references, descriptions and certificates."""

from __future__ import annotations

from paceline import errors
from paceline.codec.messages import make
from paceline.types import AdapterGroup, ModelCertificate, ModelInfo, ModelRef, PackingMode, ServedModel
from paceline.types.v1 import model_pb2 as pb


def model_ref_to_proto(ref: ModelRef) -> pb.ModelRef:
    """Encode a reference to weights."""
    if ref.checkpoint:
        return make(pb.ModelRef, "model.", checkpoint=ref.checkpoint)
    if ref.run_id:
        return pb.ModelRef(version=make(pb.VersionRef, "model.version.", run_id=ref.run_id, version=ref.version))
    return pb.ModelRef(base=make(pb.BaseModel, "model.base.", name=ref.base))


def model_ref_from_proto(message: pb.ModelRef, field: str = "model") -> ModelRef:
    """Decode a reference to weights. Raises MissingField if no member is set, OutOfRange for version 0."""
    match message.WhichOneof("model"):
        case "checkpoint":
            return ModelRef(checkpoint=message.checkpoint)
        case "version":
            return _version_ref_from_proto(message.version, f"{field}.version")
        case "base":
            return ModelRef(base=message.base.name)
        case _:
            raise errors.MissingField("is not set; name the base model, a version or a checkpoint", field=field)


def _version_ref_from_proto(message: pb.VersionRef, field: str) -> ModelRef:
    if not message.run_id:
        raise errors.MissingField("is not set; name the run", field=f"{field}.run_id")
    if not message.HasField("version"):
        return ModelRef(run_id=message.run_id)
    if message.version == 0:
        raise errors.OutOfRange("is 0; versions count from 1, leave it unset for the newest", field=f"{field}.version")
    return ModelRef(run_id=message.run_id, version=message.version)


def served_model_to_proto(model: ServedModel) -> pb.ServedModel:
    """Encode the weights that produced an answer."""
    return pb.ServedModel(
        base_model=model.base_model,
        run_id=model.run_id,
        version=model.version,
        checkpoint=model.checkpoint,
        blake3=model.blake3,
    )


def served_model_from_proto(message: pb.ServedModel) -> ServedModel:
    """Decode the weights that produced an answer."""
    return ServedModel(
        base_model=message.base_model,
        run_id=message.run_id,
        version=message.version,
        checkpoint=message.checkpoint,
        blake3=message.blake3,
    )


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    """Encode a service's description of a base model."""
    return pb.ModelInfo(
        name=info.name,
        max_context_length=info.max_context_length,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        max_lora_rank=info.max_lora_rank,
        num_layers=info.num_layers,
        certificate=None if info.certificate is None else _certificate_to_proto(info.certificate),
        weights_sha256=info.weights_sha256,
        unserved_modules=info.unserved_modules,
    )


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    """Decode a service's description of a base model."""
    return ModelInfo(
        name=message.name,
        max_context_length=message.max_context_length,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
        max_lora_rank=message.max_lora_rank,
        num_layers=message.num_layers,
        certificate=_certificate_from_proto(message.certificate) if message.HasField("certificate") else None,
        weights_sha256=message.weights_sha256,
        unserved_modules=tuple(message.unserved_modules),
    )


def _certificate_to_proto(certificate: ModelCertificate) -> pb.ModelCertificate:
    return pb.ModelCertificate(
        packing=pb.PackingMode.ValueType(certificate.packing.value),
        attention=certificate.attention,
        reason=certificate.reason,
        tokens=certificate.tokens,
        logprob_difference=certificate.logprob_difference,
        logprob_bound=certificate.logprob_bound,
        gradient_difference=certificate.gradient_difference,
        gradient_bound=certificate.gradient_bound,
        seconds=certificate.seconds,
        groups=[
            pb.AdapterGroup(name=group.name, modules=group.modules, refusal=group.refusal)
            for group in certificate.groups
        ],
    )


def _certificate_from_proto(message: pb.ModelCertificate) -> ModelCertificate:
    return ModelCertificate(
        packing=PackingMode(message.packing),
        attention=message.attention,
        reason=message.reason,
        tokens=message.tokens,
        logprob_difference=message.logprob_difference,
        logprob_bound=message.logprob_bound,
        gradient_difference=message.gradient_difference,
        gradient_bound=message.gradient_bound,
        seconds=message.seconds,
        groups=tuple(AdapterGroup(group.name, tuple(group.modules), group.refusal) for group in message.groups),
    )
