"""Result types of calls, in addition to `paceline.types`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import codec
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import Checkpoint, ModelInfo, Quota, ServedModel
from paceline.types.reprs import ShortRepr
from paceline.types.training import Array, ComparedByValue
from paceline.weights.v1 import weight_service_pb2 as weights_pb


@dataclass(frozen=True, slots=True)
class Account:
    """The account that a client's API key belongs to."""

    tenant: str
    """Tenant whose runs the key can access."""
    key_name: str
    """Name of the key; empty if the gateway runs with --insecure."""
    quotas: tuple[Quota, ...] = ()
    """The tenant's quotas, from the services that answered."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Confirmation that a version is active at a sampler."""

    run_id: str
    """Run of the version."""
    version: int
    """Number of the version."""
    blake3: str
    """BLAKE3-256 of the version, lower-case hex."""
    sampler_id: str
    """The sampler's own name."""
    milliseconds: float
    """From the announcement's arrival to the version being active."""
    step_wait_milliseconds: float = 0.0
    """Part of `milliseconds`: waiting for the engine's running step."""
    apply_milliseconds: float = 0.0
    """Part of `milliseconds`: the engine loaded the version and no request advanced."""


@dataclass(frozen=True, slots=True, repr=False)
class PublishResult(ShortRepr):
    """A newly published version."""

    model: ServedModel
    """The version, as samplers name it."""
    acknowledgements: tuple[Acknowledgement, ...]
    """Acknowledgements received by the time the call was answered."""
    stage_milliseconds: float
    """From the start of the command's execution until the version was staged and announced."""
    total_milliseconds: float
    """From the start of the command's execution until the answer."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LogprobsResult(ComparedByValue, ShortRepr):
    """Log-probabilities of a sequence of N tokens."""

    logprobs: Array
    """float32, shape [N]: token i given the tokens before it, at temperature 1; NaN at position 0."""
    model: ServedModel
    """The weights that produced them."""


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """A base model, and whether it can be trained and sampled."""

    model: ModelInfo
    """The model."""
    trainable: bool
    """Whether runs can train it."""
    sampleable: bool
    """Whether a sampler serves it."""

    @property
    def model_name(self) -> str:
        """The model's name, as `base_model` of other calls takes it."""
        return self.model.name


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """The models, losses and optimizers that a deployment offers."""

    service_version: str
    """Version of the gateway."""
    supported_models: tuple[SupportedModel, ...]
    """Base models."""
    loss_fns: tuple[str, ...]
    """Names of losses, for `loss_fn`."""
    optimizers: tuple[str, ...]
    """Names of optimizers; docs/optimizers.md has their classes."""
    max_message_bytes: int
    """Largest message in bytes. Batches are split to fit it."""
    unused_samplers: tuple[str, ...] = ()
    """Samplers that get no calls because their base model is not the trainer's, or that refuse all requests: a
    sentence each."""


def path_of(checkpoint: str | Checkpoint) -> str:
    """Return the path of a checkpoint, which callers may give instead of its path."""
    return checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint


def publish_result_from_proto(message: trainer_pb.PublishWeightsResponse) -> PublishResult:
    """Decode a publish result."""
    return PublishResult(
        model=codec.served_model_from_proto(message.model),
        acknowledgements=tuple(_acknowledgement_from_proto(one) for one in message.acknowledgements),
        stage_milliseconds=message.stage_milliseconds,
        total_milliseconds=message.total_milliseconds,
    )


def _acknowledgement_from_proto(message: weights_pb.Acknowledgement) -> Acknowledgement:
    return Acknowledgement(
        run_id=message.run_id,
        version=message.version,
        blake3=message.blake3,
        sampler_id=message.sampler_id,
        milliseconds=message.milliseconds,
        step_wait_milliseconds=message.step_wait_milliseconds,
        apply_milliseconds=message.apply_milliseconds,
    )


def capabilities_from_proto(message: gateway_pb.GetCapabilitiesResponse) -> ServerCapabilities:
    """Decode a deployment's capabilities."""
    return ServerCapabilities(
        service_version=message.service_version,
        supported_models=tuple(
            SupportedModel(codec.model_info_from_proto(one.model), one.trainable, one.sampleable)
            for one in message.models
        ),
        loss_fns=tuple(message.loss_fns),
        optimizers=tuple(message.optimizers),
        max_message_bytes=message.max_message_bytes,
        unused_samplers=tuple(message.unused_samplers),
    )
