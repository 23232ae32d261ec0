"""What each command of a run asks for, decoded and checked by its request alone, before its turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import codec, errors, layout
from paceline.layout import CheckpointPath
from paceline.rpc.bounds import check_message
from paceline.spans import span
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CheckpointKind, Datum, ForwardBackwardSpec, ModelInfo, OptimizerParams
from trainer_service import validation
from trainer_service.checkpoints.expiry import check_ttl
from trainer_service.engine_link.optimizer_specs import spec_of
from trainer_service.publish.watch_hub import AckPolicy
from trainer_service.runs.pending import MAX_OUTSTANDING

_DEFAULT_ACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What a ForwardBackward asks for."""

    data: list[Datum]
    spec: ForwardBackwardSpec
    """With the loss's defaults filled in."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an OptimStep asks for."""

    params: OptimizerParams | None
    """None: the gradient is discarded."""
    only_if_succeeded_since: int
    """First of the passes that must have succeeded; 0 for none."""


@dataclass(frozen=True, slots=True)
class Save:
    """What a SaveCheckpoint asks for."""

    path: CheckpointPath
    ttl_seconds: int | None
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a LoadCheckpoint asks for."""

    path: CheckpointPath
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """What a PublishWeights asks for."""

    durable: bool
    policy: AckPolicy
    ack_seconds: float


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a ForwardBackward may hold."""

    model: Callable[[], ModelInfo]
    """Returns the base model. Raises EngineUnavailable while it is not known."""
    max_datums: int


def input_of(request: Any, limits: InputLimits) -> Any:
    """Check the request of a command, and return what it asks for.

    Raises PacelineError: EngineUnavailable while the base model's limits are not known, else a refusal that names the
    field.
    """
    check_message(request)
    match request:
        case pb.ForwardBackwardRequest():
            return _pass_of(request, limits)
        case pb.OptimStepRequest():
            return _step_of(request)
        case pb.SaveCheckpointRequest():
            return _save_of(request)
        case pb.LoadCheckpointRequest():
            return _load_of(request)
        case pb.PublishWeightsRequest():
            return _publish_of(request)
        case _:
            raise TypeError(f"{type(request).__name__} is no command")


def _pass_of(request: pb.ForwardBackwardRequest, limits: InputLimits) -> Pass:
    data = [codec.datum_from_proto(datum, f"data[{index}]") for index, datum in enumerate(request.data)]
    spec = codec.spec_from_proto(request)
    return Pass(data, validation.check_batch(data, spec, limits.model(), limits.max_datums))


def _step_of(request: pb.OptimStepRequest) -> Step:
    since, own = request.only_if_succeeded_since, request.seq_id
    if since and not own - MAX_OUTSTANDING <= since <= own:
        message = f"is {since}; it must be {span(max(1, own - MAX_OUTSTANDING), own)}"
        raise errors.OutOfRange(message, field="only_if_succeeded_since")
    if request.HasField("discard_gradient"):
        return Step(None, since)
    params = codec.optimizer_from_proto(request)
    spec_of(params).check(params)
    return Step(params, since)


def _save_of(request: pb.SaveCheckpointRequest) -> Save:
    if not request.kind:
        raise errors.MissingField("is not set; send STATE or SAMPLER", field="kind")
    path = CheckpointPath(request.run_id, CheckpointKind(request.kind), layout.check_name(request.name))
    ttl_seconds = request.ttl_seconds if request.HasField("ttl_seconds") else None
    check_ttl(ttl_seconds)
    return Save(path, ttl_seconds, request.overwrite)


def _load_of(request: pb.LoadCheckpointRequest) -> Load:
    path = CheckpointPath.parse(request.path)
    if request.with_optimizer and path.kind is not CheckpointKind.STATE:
        raise errors.CheckpointMismatch("a sampler checkpoint has no optimizer; load only weights", field="path")
    return Load(path, request.with_optimizer)


def _publish_of(request: pb.PublishWeightsRequest) -> Publish:
    policy = AckPolicy(request.wait_for or AckPolicy.NONE.value)
    return Publish(request.durable, policy, request.ack_timeout_ms / 1e3 or _DEFAULT_ACK_SECONDS)
