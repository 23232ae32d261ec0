"""Trains one online model: a batch of examples, a step, a version, and again while examples wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any
from uuid import uuid4

from google.protobuf.message import Message

from gateway.http.online.store import Command, Example, ExampleState, OnlineModel, OnlineStore
from gateway.http.services import Services
from paceline import codec, errors
from paceline.log import get_logger
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.optimizers import OPTIMIZERS
from paceline.types.v1 import full_pb2, lora_pb2

METADATA = {"api": "online"}
_SECONDS = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds between attempts to send a command that nobody answered."""
_PUBLISH_SECONDS = 5.0
"""While examples wait, versions are at least so far apart."""
_FORWARD_BACKWARD, _OPTIM_STEP, _PUBLISH, _SAVE = "forward_backward", "optim_step", "publish", "save"
_KINDS: Mapping[str, tuple[type[Message], type[Message]]] = {
    _FORWARD_BACKWARD: (pb.ForwardBackwardRequest, pb.ForwardBackwardResponse),
    _OPTIM_STEP: (pb.OptimStepRequest, pb.OptimStepResponse),
    _PUBLISH: (pb.PublishWeightsRequest, pb.PublishWeightsResponse),
    _SAVE: (pb.SaveCheckpointRequest, pb.SaveCheckpointResponse),
}
_OVER = (errors.ClientSuperseded, errors.RunNotFound, errors.RunStateLost)
"""Refusals after which a model is not trained until more is posted."""
_log = get_logger(__name__)


class Learner:
    """Owns the order of one model's commands."""

    def __init__(self, services: Services, store: OnlineStore, model: OnlineModel) -> None:
        self._services, self._store = services, store
        self.model = model
        self._turn = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._published = -_PUBLISH_SECONDS
        self.problem = ""
        """Why the last command was refused, or has no answer yet; empty while all goes well."""

    @property
    def is_busy(self) -> bool:
        """Whether it trains."""
        return self._working is not None and not self._working.done()

    def wake(self) -> None:
        """Train on what waits."""
        if not self.is_busy:
            self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End; what is under way is sent again by another."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    async def begin(self, base_model: str) -> None:
        """Make the model's run, or attach to it again where another client did.

        Raises what the trainer raises; RunNotFound where the run was deleted.
        """
        if self._can_train():
            return
        async with self._turn:
            if self._can_train():
                return
            model = self.model
            run_id = model.run_id or await self._create(base_model)
            request = pb.AttachRunRequest(run_id=run_id, request_id=uuid4().hex)
            reply = await self._services.call(model.tenant, request, pb.AttachRunResponse)
            await self._store.attach(model, run_id, reply.attachment, reply.run.last_seq_id + 1)
            self.model = self._store.again(model)

    async def save(self, name: str) -> str:
        """Save a state checkpoint after the batch under way; return its path. Raises what the trainer raises."""
        async with self._turn:
            await self._send_all()
            self.model = self._store.again(self.model)
            if self.model.stopped:
                raise errors.FailedPrecondition(f"is stopped: {self.model.stopped}", field="model")
            name = name or f"step-{self.model.step}"
            request = pb.SaveCheckpointRequest(name=name, kind=pb.CHECKPOINT_KIND_STATE, overwrite=True)
            await self._issue([(_SAVE, request)])
            (command,) = self._store.commands(self.model)
            reply = await self._send(command)
        assert isinstance(reply, pb.SaveCheckpointResponse)  # noqa: S101
        return reply.checkpoint.path

    def _can_train(self) -> bool:
        self.model = self._store.again(self.model)
        return bool(self.model.run_id) and not self.model.stopped

    async def _create(self, base_model: str) -> str:
        model = self.model
        request = pb.CreateRunRequest(
            request_id=model.request_id, base_model=base_model, user_metadata={**METADATA, "name": model.name}
        )
        if model.lora:
            request.lora.CopyFrom(lora_pb2.LoraConfig(**model.lora))
        else:
            request.full.CopyFrom(full_pb2.FullParameters())
        return (await self._services.call(model.tenant, request, pb.CreateRunResponse, seconds=_SECONDS)).run.run_id

    async def _work(self) -> None:
        try:
            while not self._store.again(self.model).stopped:
                async with self._turn:
                    await self._send_all()
                    self.model = self._store.again(self.model)
                    batch = self._store.next_batch(self.model)
                    if self.model.stopped or not batch:
                        return
                    await self._issue(self._commands(batch), batch)
                    await self._send_all()
        except Exception as error:  # told by the status; the next example begins it again
            self.problem = str(error) if isinstance(error, errors.PacelineError) else "internal error; see the log"
            _log.exception("online training ends", model=self.model.name)

    def _commands(self, batch: Sequence[Example]) -> list[tuple[str, Message]]:
        """Return what trains on a batch: its loss is the mean over the tokens of responses."""
        carried = pb.ForwardBackwardRequest(
            loss_fn="cross_entropy", reduction=pb.REDUCTION_TOKEN_MEAN, refuse_non_finite=True
        )
        for example in batch:
            carried.MergeFromString(example.data)
        params = OPTIMIZERS[self.model.optimizer](learning_rate=batch[0].learning_rate)
        commands: list[tuple[str, Message]] = [
            (_FORWARD_BACKWARD, carried),
            (_OPTIM_STEP, codec.optimizer_to_proto(params)),
        ]
        waiting = self._store.counts(self.model)[ExampleState.WAITING] > len(batch)
        if not waiting or monotonic() - self._published >= _PUBLISH_SECONDS:
            publish = pb.PublishWeightsRequest(durable=True, wait_for=pb.ACK_POLICY_ANY)
            commands.append((_PUBLISH, publish))
            self._published = monotonic()
        return commands

    async def _issue(self, requests: Sequence[tuple[str, Message]], examples: Sequence[Example] = ()) -> None:
        model, commands = self.model, []
        for number, (kind, request) in enumerate(requests, model.next_seq_id):
            place: Any = request
            place.run_id, place.seq_id, place.attachment = model.run_id, number, model.attachment
            commands.append(Command(number, kind, request.SerializeToString(deterministic=True)))
        await self._store.issue(model, commands, examples)

    async def _send_all(self) -> None:
        """Send what has no answer, each until it has one, and keep what the answers say."""
        for command in self._store.commands(self.model):
            try:
                await self._send(command)
            except _OVER:
                return
            except errors.PacelineError:
                continue

    async def _send(self, command: Command) -> Message:
        """Send one command until it is answered. Raises what it is refused with, which is noted."""
        try:
            reply = await self._until_answered(command)
        except errors.PacelineError as error:
            await self._refused(command, error)
            raise
        self.problem = ""
        facts: dict[str, float] = {}
        if isinstance(reply, pb.ForwardBackwardResponse):
            facts = {"loss": reply.metrics["loss:sum"]}
        elif isinstance(reply, pb.OptimStepResponse):
            await self._store.settle(self.model, ExampleState.TRAINED)
            facts = {"step": reply.step, "tokens": self._store.again(self.model).tokens + reply.tokens}
        elif isinstance(reply, pb.PublishWeightsResponse):
            facts = {"version": reply.model.version}
        await self._store.answered(self.model, command, **facts)
        return reply

    async def _refused(self, command: Command, error: errors.PacelineError) -> None:
        model, self.problem = self.model, str(error)
        _log.warning(
            "online training", model=model.name, command=command.kind, seq_id=command.seq_id, problem=str(error)
        )
        if isinstance(error, errors.SeqIdExpired):  # It was executed, so long ago that its answer is not kept.
            if command.kind == _OPTIM_STEP:
                await self._store.settle(model, ExampleState.TRAINED)
        elif command.kind == _FORWARD_BACKWARD and isinstance(error, errors.ClientSuperseded):
            await self._store.settle(model, ExampleState.WAITING)
        elif command.kind in {_FORWARD_BACKWARD, _OPTIM_STEP}:
            await self._store.settle(model, ExampleState.FAILED, str(error))
        if isinstance(error, _OVER):
            await self._store.stop(model, str(error))
        else:
            await self._store.answered(model, command)

    async def _until_answered(self, command: Command) -> Message:
        request_type, reply_type = _KINDS[command.kind]
        request, pause = request_type.FromString(command.request), _FIRST_PAUSE
        while True:
            try:
                return await self._services.call(self.model.tenant, request, reply_type, seconds=_SECONDS)
            except errors.PacelineError as error:
                is_late = isinstance(error, errors.Unavailable | errors.TimedOut | errors.SeqIdGap)
                if isinstance(error, errors.AckTimeout) or not (is_late or error.retry_after is not None):
                    raise
                self.problem = str(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
