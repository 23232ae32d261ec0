"""Commands and their states as Execute and Follow carry them."""

from __future__ import annotations

from typing import Any

from paceline import errors
from paceline.codec.commands import ORDER_FIELDS, put_answer
from paceline.requests.bodies import INLINE_BYTES
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.runs.status import CommandStatus


def command_of(request: pb.ExecuteRequest) -> Any:
    """Return the request of the command's own call. Raises MissingField, InvalidArgument."""
    name = request.WhichOneof("command")
    if name is None:
        raise errors.MissingField("is not set; set one of the five commands", field="command")
    command = getattr(request, name)
    for field in ORDER_FIELDS:
        if getattr(command, field):
            message = f"is set in the command; set {field} of the ExecuteRequest instead"
            raise errors.InvalidArgument(message, field=f"{name}.{field}")
        setattr(command, field, getattr(request, field))
    return command


def size_of(request: Any) -> int:
    """Return the bytes of a command's request, or of the first of its data if they are too many to be decoded here.

    To measure all of a large message takes as long as to serialize it.
    """
    counted = 0
    for datum in getattr(request, "data", ()):
        tensors = (datum.model_input, *datum.loss_inputs.values())
        counted += sum(len(tensor.data) for tensor in tensors)
        if counted > INLINE_BYTES:
            return counted
    return int(request.ByteSize())


def status_to_proto(status: CommandStatus) -> pb.CommandStatus:
    """Encode a status."""
    message = pb.CommandStatus(
        seq_id=status.seq_id,
        state=pb.CommandState.ValueType(status.state.value),
        digest=status.digest,
        attachment=status.attachment,
        commands_ahead=status.commands_ahead,
        executing_seconds=status.executing_seconds,
        missing_seq_id=status.missing_seq_id,
        answer_expired=status.answer_expired,
        is_another=status.is_another,
    )
    put_answer(message, status.answer)
    return message
