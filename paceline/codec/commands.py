"""Commands as Execute carries them, and what their statuses answer: the same for all that send commands."""

from __future__ import annotations

from typing import Any

from paceline import errors
from paceline.codec.errors import error_from_proto
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

_FIELDS = {
    pb.ForwardBackwardRequest: "forward_backward",
    pb.OptimStepRequest: "optim_step",
    pb.SaveCheckpointRequest: "save_checkpoint",
    pb.LoadCheckpointRequest: "load_checkpoint",
    pb.PublishWeightsRequest: "publish_weights",
}
_ORDER = ("run_id", "seq_id", "attachment")
_MAY_HAVE_ARRIVED = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL}
"""After any other error of Execute, the trainer does not have the command, and its seq_id is free."""


def execute_request(command: Command, run_id: str, seq_id: int, attachment: int) -> pb.ExecuteRequest:
    """Return the call that has the trainer take a command, and is answered with the first status.

    The command's own run_id, seq_id and attachment, if set, are left out.
    """
    request = pb.ExecuteRequest(run_id=run_id, seq_id=seq_id, attachment=attachment, max_seconds=0)
    inner: Any = getattr(request, _FIELDS[type(command)])
    inner.CopyFrom(command)
    for field in _ORDER:
        inner.ClearField(field)
    return request


def may_have_arrived(error: errors.PacelineError) -> bool:
    """Return whether the trainer may have the command although its Execute ended in this error."""
    return error.code in _MAY_HAVE_ARRIVED


def reply_in(status: pb.CommandStatus) -> Any:
    """Return the reply in the status of a command that has ended. Raises its error, with its fate."""
    error: errors.PacelineError
    match status.WhichOneof("answer"):
        case "error":
            error = error_from_proto(status.error)
        case None if status.is_another:
            message = "another client has sent another command as this one; attach to the run again"
            error = errors.SeqIdReused(message, field="seq_id")
        case None if CommandState(status.state) is CommandState.NOT_ARRIVED:
            error = errors.SeqIdGap("the trainer does not have it; attach to the run again", field="seq_id")
        case None:
            error = errors.SeqIdExpired("it ended so long ago that its answer is no longer kept", field="seq_id")
        case answer:
            return getattr(status, answer)
    is_given_up = CommandState(status.state) is CommandState.NOT_ARRIVED
    error.fate = Fate.TURNED_AWAY if is_given_up else Fate.ANSWERED
    raise error
