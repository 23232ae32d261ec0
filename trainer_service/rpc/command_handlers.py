"""Decodes, executes and encodes a run's commands, one method per RPC, for callers and for replays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from paceline import codec, errors
from paceline.codec.resources import checkpoint_to_proto, run_to_proto
from paceline.layout import CheckpointPath
from paceline.rpc.bounds import check_message
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CheckpointKind, Datum
from trainer_service.publish.watch_hub import AckPolicy
from trainer_service.runs.command import Command
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord
from trainer_service.trainer import Trainer

_DEFAULT_ACK_SECONDS = 60.0


class Commands:
    """Executes commands on the trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._verbs: dict[str, Callable[[RunRecord, Command, Any, CommandProgress], Awaitable[Message]]] = {
            "ForwardBackward": self._forward_backward,
            "OptimStep": self._optim_step,
            "SaveCheckpoint": self._save_checkpoint,
            "LoadCheckpoint": self._load_checkpoint,
            "PublishWeights": self._publish_weights,
        }

    def checked(self, run: RunRecord, command: Command) -> Command:
        """Check a command on arrival, as far as this needs only the command and the room for it in the journal.

        An invalid command is returned without its content, which is no longer needed. It keeps its place in the run's
        order and answers with the reason for its refusal at its turn.
        """
        try:
            check_message(command.request)
            if command.method == "ForwardBackward":
                self._trainer.check_batch(_data(command.request), codec.spec_from_proto(command.request))
                self._trainer.check_room(run, command.size)
        except errors.Unavailable:
            return command  # what it would be checked against is unknown at present
        except errors.PacelineError as error:
            return command.refused(error)
        return command

    async def execute(self, run: RunRecord, command: Command, progress: CommandProgress) -> Message:
        """Execute a command and return its reply. Raises PacelineError."""
        if command.refusal is not None:
            raise command.refusal
        check_message(command.request)
        return await self._verbs[command.method](run, command, command.request, progress)

    async def _forward_backward(
        self, run: RunRecord, _: Command, request: pb.ForwardBackwardRequest, __: CommandProgress
    ) -> Message:
        output = await self._trainer.forward_backward(run, _data(request), codec.spec_from_proto(request))
        outputs = [codec.output_to_proto(datum) for datum in output.loss_fn_outputs]
        return pb.ForwardBackwardResponse(outputs=outputs, metrics=output.metrics)

    async def _optim_step(
        self, run: RunRecord, _: Command, request: pb.OptimStepRequest, __: CommandProgress
    ) -> Message:
        output = await self._trainer.optim_step(run, codec.optimizer_from_proto(request))
        return pb.OptimStepResponse(
            step=output.step,
            grad_norm=output.grad_norm,
            learning_rate=output.learning_rate,
            tokens=output.tokens,
            milliseconds=output.milliseconds,
        )

    async def _save_checkpoint(
        self, run: RunRecord, command: Command, request: pb.SaveCheckpointRequest, progress: CommandProgress
    ) -> Message:
        if request.kind not in {kind.value for kind in CheckpointKind}:
            raise errors.MissingField("is not set; say STATE or SAMPLER", field="kind")
        checkpoint = await self._trainer.save_checkpoint(
            run,
            request.name,
            CheckpointKind(request.kind),
            seq_id=command.seq_id,
            ttl_seconds=request.ttl_seconds if request.HasField("ttl_seconds") else None,
            overwrite=request.overwrite,
            progress=progress,
        )
        return pb.SaveCheckpointResponse(checkpoint=checkpoint_to_proto(checkpoint))

    async def _load_checkpoint(
        self, run: RunRecord, command: Command, request: pb.LoadCheckpointRequest, _: CommandProgress
    ) -> Message:
        await self._trainer.load_checkpoint(
            run,
            Identity(command.tenant),
            CheckpointPath.parse(request.path),
            seq_id=command.seq_id,
            with_optimizer=request.with_optimizer,
        )
        return pb.LoadCheckpointResponse(run=run_to_proto(run.public()))

    async def _publish_weights(
        self, run: RunRecord, command: Command, request: pb.PublishWeightsRequest, progress: CommandProgress
    ) -> Message:
        done = await self._trainer.publish(
            run,
            seq_id=command.seq_id,
            durable=request.durable,
            policy=AckPolicy(request.wait_for or AckPolicy.NONE.value),
            ack_seconds=request.ack_timeout_ms / 1e3 or _DEFAULT_ACK_SECONDS,
            progress=progress,
        )
        return pb.PublishWeightsResponse(
            model=codec.served_model_to_proto(done.model),
            acknowledgements=done.acknowledgements,
            stage_milliseconds=done.stage_milliseconds,
            total_milliseconds=done.total_milliseconds,
        )


def _data(request: pb.ForwardBackwardRequest) -> list[Datum]:
    return [codec.datum_from_proto(datum, f"data[{index}]") for index, datum in enumerate(request.data)]
