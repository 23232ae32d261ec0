"""Commands as Execute carries them, and the answers in their statuses: the same for the trainer and all senders."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from paceline import errors
from paceline.codec.errors import error_from_proto, error_to_proto
from paceline.codec.messages import make
from paceline.errors import Code, Fate
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CommandState

Command = (
    pb.ForwardBackwardRequest
    | pb.OptimStepRequest
    | pb.SaveCheckpointRequest
    | pb.LoadCheckpointRequest
    | pb.PublishWeightsRequest
)

_FIELDS: dict[type[Message], str] = {
    message: field
    for field, messages in {
        "forward_backward": (pb.ForwardBackwardRequest, pb.ForwardBackwardResponse),
        "optim_step": (pb.OptimStepRequest, pb.OptimStepResponse),
        "save_checkpoint": (pb.SaveCheckpointRequest, pb.SaveCheckpointResponse),
        "load_checkpoint": (pb.LoadCheckpointRequest, pb.LoadCheckpointResponse),
        "publish_weights": (pb.PublishWeightsRequest, pb.PublishWeightsResponse),
    }.items()
    for message in messages
}
"""The field of a command in an ExecuteRequest, and of its reply in a CommandStatus."""
ORDER_FIELDS = ("run_id", "seq_id", "attachment")
"""What an ExecuteRequest and the request of a command's own call have in common."""
_MAY_HAVE_ARRIVED = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL}
"""After any other error of Execute, the trainer does not have the command, and its seq_id is free."""


def execute_request(command: Command, run_id: str, seq_id: int, attachment: int) -> pb.ExecuteRequest:
    """Return the call that has the trainer take a command, and is answered with the first status.

    The command's own run_id, seq_id and attachment, if set, are left out. Raises OutOfRange for a number that its field
    cannot hold.
    """
    request = make(pb.ExecuteRequest, run_id=run_id, seq_id=seq_id, attachment=attachment, max_seconds=0)
    inner: Any = getattr(request, _FIELDS[type(command)])
    inner.CopyFrom(command)
    for field in ORDER_FIELDS:
        inner.ClearField(field)
    return request


def may_have_arrived(error: errors.PacelineError) -> bool:
    """Return whether the trainer may have the command although its Execute ended in this error."""
    return error.code in _MAY_HAVE_ARRIVED


def put_answer(status: pb.CommandStatus, answer: Message | errors.PacelineError | None) -> None:
    """Set the answer of a status, if there is one."""
    if isinstance(answer, errors.PacelineError):
        status.error.CopyFrom(error_to_proto(answer))
    elif answer is not None:
        getattr(status, _FIELDS[type(answer)]).CopyFrom(answer)


def reply_in(status: pb.CommandStatus) -> Any:
    """Return the reply in the status of a command that has ended. Raises its error, with its fate."""
    error: errors.PacelineError
    match status.WhichOneof("answer"):
        case "error":
            error = error_from_proto(status.error)
        case None if status.is_another:
            message = (
                "another client has sent another command as this one; attach to the run again (get_training_client)"
            )
            error = errors.SeqIdReused(message, field="seq_id")
        case None if CommandState(status.state) is CommandState.NOT_ARRIVED:
            error = errors.SeqIdGap(
                "the trainer does not have it; attach to the run again (get_training_client)", field="seq_id"
            )
        case None:
            message = "it ended so long ago that its answer is no longer kept; attach to the run again"
            error = errors.SeqIdExpired(f"{message} (get_training_client)", field="seq_id")
            error.fate = Fate.UNKNOWN
            raise error
        case answer:
            return getattr(status, answer)
    is_given_up = CommandState(status.state) is CommandState.NOT_ARRIVED
    error.fate = Fate.TURNED_AWAY if is_given_up else Fate.ANSWERED
    raise error
