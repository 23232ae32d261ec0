"""Train one online model: a batch of examples, a step, a version; repeat while examples wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from uuid import uuid4

from google.protobuf.message import Message

from gateway.http.online.store import Example, ExampleState, OnlineModel, OnlineStore, Settled, StoredCommand
from gateway.http.run_names import ONLINE
from gateway.http.services import Services, is_unread
from gateway.http.state import StateUnusable
from paceline import codec, errors
from paceline.client.retry import is_retryable
from paceline.errors import Fate
from paceline.log import get_logger
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.optimizers import OPTIMIZERS
from paceline.types.v1 import full_pb2, lora_pb2

_SECONDS = 600.0
FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds between attempts to send an unanswered command."""
_PUBLISH_SECONDS = 5.0
"""Minimum time between versions while examples wait."""
_ACK_SECONDS = 10.0
"""How long a publish waits for a sampler to serve the version."""
_PUBLISH_AGAIN_SECONDS = 30.0
_SLOW_SECONDS = 10.0
"""After this time an unanswered command is reported as a problem."""
_FORWARD_BACKWARD, _OPTIM_STEP, _PUBLISH, _SAVE = "forward_backward", "optim_step", "publish", "save"
_KINDS: Mapping[str, type[Message]] = {
    _FORWARD_BACKWARD: pb.ForwardBackwardRequest,
    _OPTIM_STEP: pb.OptimStepRequest,
    _PUBLISH: pb.PublishWeightsRequest,
    _SAVE: pb.SaveCheckpointRequest,
}
_STOPS = (
    errors.ClientSuperseded,
    errors.RunNotFound,
    errors.RunStateLost,
    errors.SeqIdGap,
    errors.OptimizerChanged,
    errors.QuotaExceeded,
    errors.DiskFull,
    errors.MessageTooLarge,
)
"""Refusals that the next examples would get as well."""
_log = get_logger(__name__)


class Learner:
    """Owns the order of one model's commands."""

    def __init__(self, services: Services, store: OnlineStore, model: OnlineModel, most_bytes: int) -> None:
        """`most_bytes` bounds the examples of one call; it falls when the trainer accepts less."""
        self._services, self._store, self._most_bytes = services, store, most_bytes
        self._known = model
        self._turn = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[str] | None = None
        self._woken = asyncio.Event()
        self._published = -_PUBLISH_SECONDS
        self._must_publish = False
        self._late = self._unpublished = self._ended = ""
        self._asked: tuple[str, float] | None = None
        """The command in flight, and when it was sent."""
        self._loss: float | None = None
        """Loss of the current batch."""

    @property
    def model(self) -> OnlineModel:
        """The current state of the model. Raises ModelNotFound if it was removed."""
        return self._store.again(self._known)

    @property
    def is_busy(self) -> bool:
        """Whether training is in progress."""
        return self._working is not None and not self._working.done()

    @property
    def problem(self) -> str:
        """Why a command is unanswered, the newest version is not served, or training ended; empty if none applies."""
        slow = ""
        if self._asked is not None and (seconds := monotonic() - self._asked[1]) > _SLOW_SECONDS:
            slow = f"the trainer has worked on {self._asked[0]}, or on what is before it, for {seconds:.0f} s"
        return self._late or slow or self._unpublished or self._ended

    def wake(self) -> None:
        """Train on the waiting examples."""
        self._woken.set()
        if not self.is_busy:
            self._ended = ""
            self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop training and saving; another learner sends unanswered commands again."""
        tasks = [task for task in (self._working, self._saving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, base_model: str = "") -> Learner:
        """Create the model's run, or attach to it again if its training was stopped. Returns the learner.

        `base_model` is that of a new run; empty means the one that the trainer serves.
        Raises the trainer's errors: RunNotFound if the run was deleted, RunStateLost if it cannot continue.
        """
        if self._can_train():
            return self
        async with self._turn:
            if self._can_train():
                return self
            model = self.model
            run_id = model.run_id or await self._create(base_model)
            request = pb.AttachRunRequest(run_id=run_id, request_id=uuid4().hex)
            reply = await self._services.call(model.tenant, request, pb.AttachRunResponse)
            if reply.run.state == pb.RUN_STATE_LOST:
                message = "the run's state is lost; load a checkpoint into it by LoadCheckpoint, or name another model"
                raise errors.RunStateLost(message, field="model")
            await self._store.attach(model, run_id, reply.attachment, reply.run.last_seq_id + 1)
            if not reply.run.latest_version:  # The model can be sampled from at once, as it is.
                await self._issue([self._publish()])
        return self

    async def save(self, name: str) -> str:
        """Save a state checkpoint after the current batch and return its path. Raises the trainer's errors.

        If it is cancelled while it waits for the batch, nothing is saved; a save that has begun ends nevertheless.
        """
        await self._turn.acquire()
        saving = self._saving = asyncio.create_task(self._save(name))
        saving.add_done_callback(lambda _: self._turn.release())
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            saving.add_done_callback(self._log_unseen)
            raise

    async def _save(self, name: str) -> str:
        """Save a state checkpoint. The turn is the caller's."""
        await self._send_all()
        model = self.model
        if model.stopped:
            raise errors.InvalidArgument(f"is stopped: {model.stopped}", field="model")
        name = name or f"step-{model.step}"
        request = pb.SaveCheckpointRequest(name=name, kind=pb.CHECKPOINT_KIND_STATE, overwrite=True)
        await self._issue([(_SAVE, request)])
        reply = None
        for command in self._store.commands(self._known):
            reply = await self._send(command)
        if isinstance(reply, errors.PacelineError):
            raise reply
        assert isinstance(reply, pb.SaveCheckpointResponse)  # noqa: S101
        return reply.checkpoint.path

    def _log_unseen(self, saving: asyncio.Task[str]) -> None:
        """Log the failure of a save whose caller has left."""
        if not saving.cancelled() and (error := saving.exception()):
            _log.warning("checkpoint", model=self._known.name, exc_info=error)

    def _can_train(self) -> bool:
        model = self.model
        return bool(model.run_id) and not model.stopped

    async def _create(self, base_model: str) -> str:
        model = self.model
        request = pb.CreateRunRequest(
            request_id=model.request_id, base_model=base_model, user_metadata={**ONLINE, "name": model.name}
        )
        if model.lora:
            request.lora.CopyFrom(lora_pb2.LoraConfig(**model.lora))
        else:
            request.full.CopyFrom(full_pb2.FullParameters())
        return (await self._services.call(model.tenant, request, pb.CreateRunResponse, seconds=_SECONDS)).run.run_id

    async def _work(self) -> None:
        while True:
            try:
                await self._train()
            except StateUnusable as error:  # what is stored is unchanged, so it goes on where it was
                self._ended = str(error)
                await asyncio.sleep(_LONGEST_PAUSE)
                self._ended = ""
            except Exception as error:  # reported by the status; the next example restarts training
                self._ended = str(error) if isinstance(error, errors.PacelineError) else "internal error; see the log"
                _log.exception("online training ended", model=self._known.name)
                return
            else:
                return

    async def _train(self) -> None:
        """Train until no example waits."""
        while True:
            self._woken.clear()
            async with self._turn:
                await self._send_all()
                if self.model.stopped:
                    return
                batch = await self._store.next_batch(self._known, self._most_bytes)
                if not batch and self._woken.is_set():  # Examples may have come since the look.
                    continue
                if not (batch or self._must_publish):
                    return
                if batch:
                    await self._issue(self._commands(self.model, batch), batch)
                    await self._send_all()
                    continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _PUBLISH_AGAIN_SECONDS)
            async with self._turn:
                await self._issue([self._publish()])

    def _commands(self, model: OnlineModel, batch: Sequence[Example]) -> list[tuple[str, Message]]:
        """Return the commands that train on a batch. Its loss is the mean over the tokens of responses."""
        carried = pb.ForwardBackwardRequest(
            loss_fn="cross_entropy", reduction=pb.REDUCTION_TOKEN_MEAN, refuse_non_finite=True
        )
        for example in batch:
            carried.MergeFromString(example.data)
        params = OPTIMIZERS[model.optimizer](learning_rate=batch[0].learning_rate)
        commands: list[tuple[str, Message]] = [
            (_FORWARD_BACKWARD, carried),
            (_OPTIM_STEP, codec.optimizer_to_proto(params)),
        ]
        if model.waiting == len(batch) or monotonic() - self._published >= _PUBLISH_SECONDS:
            commands.append(self._publish())
        return commands

    def _publish(self) -> tuple[str, Message]:
        self._published = monotonic()
        milliseconds = int(1e3 * _ACK_SECONDS)
        return _PUBLISH, pb.PublishWeightsRequest(durable=True, wait_for=pb.ACK_POLICY_ANY, ack_timeout_ms=milliseconds)

    async def _issue(self, requests: Sequence[tuple[str, Message]], examples: Sequence[Example] = ()) -> None:
        """Store commands to send. No earlier one may be unanswered, because their numbers are consecutive."""
        model = self.model
        await self._store.issue(model, _numbered(model, model.next_seq_id, requests), examples)

    async def _send_all(self) -> None:
        """Send each unanswered command until it is answered."""
        while commands := self._store.commands(self._known):  # An answer may change what is behind it.
            await self._send(commands[0])

    async def _send(self, command: StoredCommand) -> Message | errors.PacelineError:
        """Send one command until it is answered, store the outcome, and return the answer or the refusal."""
        answer = await self._until_answered(command)
        if isinstance(answer, errors.PacelineError):
            await self._refused(command, answer)
        elif isinstance(answer, pb.ForwardBackwardResponse):
            self._loss = answer.metrics["loss:sum"]
            await self._store.answered(self._known, command)
        elif isinstance(answer, pb.OptimStepResponse):
            settled, loss = Settled(ExampleState.TRAINED), {} if self._loss is None else {"loss": self._loss}
            await self._store.answered(self._known, command, settled, step=answer.step, tokens=answer.tokens, **loss)
        elif isinstance(answer, pb.PublishWeightsResponse):
            self._unpublished, self._must_publish = "", False
            await self._store.answered(self._known, command, version=answer.model.version)
        else:
            await self._store.answered(self._known, command)
        return answer

    async def _refused(self, command: StoredCommand, error: errors.PacelineError) -> None:
        model, problem = self.model, str(error)
        _log.warning("online training", model=model.name, command=command.kind, seq_id=command.seq_id, problem=problem)
        if command.kind == _PUBLISH and not isinstance(error, errors.ClientSuperseded | errors.RunNotFound):
            self._unpublished = problem
            self._must_publish = isinstance(error, errors.DiskFull | errors.QuotaExceeded)
            version = error.metadata.get("version", "")  # A version that the error names exists nevertheless.
            newest = int(version) if version.isdecimal() else model.version
            await self._store.answered(model, command, version=newest)
        elif command.kind == _FORWARD_BACKWARD and is_unread(error):
            await self._unread(model, command, problem)
        elif isinstance(error, _STOPS) and command.kind != _SAVE:
            # A refused ForwardBackward changed nothing. A refused step leaves its gradient in the run, if that exists.
            is_without_effect = command.kind == _FORWARD_BACKWARD or isinstance(error, errors.RunNotFound)
            state = ExampleState.WAITING if is_without_effect else ExampleState.UNSURE
            await self._store.stop(model, problem, command, Settled(state, problem))
        else:
            await self._store.answered(model, command, _settled_by(command, error))

    async def _unread(self, model: OnlineModel, command: StoredCommand, problem: str) -> None:
        """Split a batch that the trainer did not read, such as one above its max_message_bytes.

        A single example fails, so that those behind it are trained on. The version that was to follow it may have
        earlier steps that no version has yet.
        """
        publishes = any(each.kind == _PUBLISH for each in self._store.commands(model))
        instead = _numbered(model, command.seq_id, [self._publish()] if publishes else [])
        problem = f"the trainer cannot read the example: {problem}; post it as smaller conversations"
        if size := await self._store.unread(model, problem, command, instead):
            self._most_bytes = min(self._most_bytes, size // 2)  # So the next batch has fewer of these examples.

    async def _until_answered(self, command: StoredCommand) -> Message | errors.PacelineError:
        """Send a command until it is answered, or turned away for good; return its reply or the error."""
        request, pause = _KINDS[command.kind].FromString(command.request), FIRST_PAUSE
        while True:
            self._asked = (command.kind, monotonic())
            try:
                answer: Message = await self._services.execute(self._known.tenant, request, seconds=_SECONDS)
            except errors.PacelineError as error:
                is_full = is_retryable(error) or isinstance(error, errors.Denied)
                if error.fate is Fate.ANSWERED or (error.fate is Fate.TURNED_AWAY and not is_full):
                    self._late = ""
                    return error
                self._late = str(error)
            else:
                self._late = ""
                return answer
            finally:
                self._asked = None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _numbered(model: OnlineModel, first: int, requests: Sequence[tuple[str, Message]]) -> list[StoredCommand]:
    """Return the commands of requests, numbered from `first`; the number of a batch is that of its first command."""
    commands = []
    for number, (kind, request) in enumerate(requests, first):
        place: Any = request
        place.run_id, place.seq_id, place.attachment = model.run_id, number, model.attachment
        batch = first if kind in {_FORWARD_BACKWARD, _OPTIM_STEP} else 0
        commands.append(StoredCommand(number, kind, batch, request.SerializeToString(deterministic=True)))
    return commands


def _settled_by(command: StoredCommand, error: errors.PacelineError) -> Settled | None:
    """Return how a refusal settles a batch's examples; None if it does not."""
    if isinstance(error, errors.SeqIdExpired):  # It was executed, but its answer is no longer kept.
        return Settled(ExampleState.TRAINED) if command.kind == _OPTIM_STEP else None
    if command.kind == _FORWARD_BACKWARD or isinstance(error, errors.NonFiniteGradient):  # The gradient was dropped.
        return Settled(ExampleState.FAILED, str(error))
    return Settled(ExampleState.UNSURE, str(error)) if command.kind == _OPTIM_STEP else None
