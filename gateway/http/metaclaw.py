"""MetaClaw's remote training API, below /v1. A session is a run; a save is a checkpoint or a version.

Its JSON and its defaults are kept: a datum's loss is the mean over its tokens with non-zero advantage, and losses are
summed over datums; AdamW has betas 0.9 and 0.999, eps 1e-8, weight decay 0.01, and gradients are clipped to norm 1.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field

from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models
from gateway.http.services import Services
from paceline import codec, errors
from paceline.client.batching import sendable
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import ModelRef, Run, SamplingParams, StopReason
from paceline.types.training import Array
from paceline.types.v1 import datum_pb2, lora_pb2

API = {"api": "metaclaw"}
"""Metadata of runs that are sessions of this API."""
_SECONDS = 600.0
_NO_ANSWER = (errors.Unavailable, errors.TimedOut, errors.Cancelled, asyncio.CancelledError)
"""What a call ends with whose command may have executed, or may still."""
_MAX_SESSIONS = 4096
_FIELDS = {
    r"^data\b": "datums",
    r"\.model_input\b.*": ".model_input_tokens",
    r"\.loss_inputs\[(\w+)\].*": r".\1",
    r"^prompt\b": "tokens",
    r"^(lora|params|adamw)\.": "",
    r"^(model\.version\.)?run_id$": "session_id",
}
"""Fields of the services -> those of this API."""
_LOSSES = ("importance_sampling", "ppo", "cispo")
_CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
_CHAT = {"temperature": 0.7, "max_tokens": 4096, "top_k": 50, "top_p": 0.95}
_VERSION = "0.1.0"
Answer = TypeVar("Answer")


class Body(BaseModel):
    """A request. Unknown fields are refused, since they would have no effect."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class LoraCreate(Body):
    """Request of lora/create."""

    base_model: str = ""
    rank: int = Field(32, ge=1, le=65536)


class WireDatum(Body):
    """One sequence."""

    model_input_tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]


class ForwardBackward(Body):
    """Request of train/forward_backward."""

    session_id: str
    datums: list[WireDatum]
    loss_fn: str = "importance_sampling"


class OptimStep(Body):
    """Request of train/optim_step."""

    session_id: str
    learning_rate: float = 1e-4


class WeightsSave(Body):
    """Request of weights/save."""

    session_id: str
    name: str = ""


class CheckpointSave(Body):
    """Request of checkpoint/save."""

    session_id: str
    name: str


class CheckpointLoad(Body):
    """Request of checkpoint/load."""

    session_id: str
    path: str


class Sample(Body):
    """Request of sample."""

    tokens: list[int]
    num_samples: int = Field(1, ge=1, le=1_000_000)
    temperature: float = 0.7
    max_tokens: int = Field(2048, ge=1, le=2**31)
    top_k: int = Field(50, ge=-1, le=2**31)
    top_p: float = 0.95
    stop: str | list[str] | None = None
    session_id: str = ""
    """Not part of MetaClaw's API: the session to sample from; empty means the newest."""


@dataclass(slots=True)
class _Session:
    """A run whose commands this API numbers."""

    attachment: int = 0
    """Zero: this API is not attached to the run, so the numbers below are not known."""
    next_seq_id: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the ForwardBackward calls since the last step."""
    unanswered: bytes = b""
    """Digest of the last request's commands if not all answers are known: the same request again is the same ones."""
    replies: list[Message] = field(default_factory=list)
    """The trainer's replies to the first of these commands."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a command is sent, so that the next one takes its number after the outcome is known."""


class MetaClawApi:
    """The routes below /v1."""

    def __init__(self, services: Services, models: Models) -> None:
        self._services = services
        self._models = models
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/v1")
        self._add_state(router)
        self._add_training(router)

        @router.post("/sample")
        async def sample(request: Request, body: Sample) -> dict[str, Any]:
            return await while_connected(request, self._sample(tenant_of(request), body))

        return router

    async def chat_without_model(self, tenant: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the weights for a chat that names no model, and its body with the defaults.

        The weights are those of the newest session if it has a version, otherwise the base model's.
        """
        newest = await self._newest(tenant)
        name = newest.run_id if newest and newest.latest_version else await self._models.served(tenant, "")
        return name, _CHAT | body

    def _add_state(self, router: APIRouter) -> None:
        @router.get("/health")
        async def health(request: Request) -> dict[str, Any]:
            identity = request.state.identity
            if identity is None:
                return {"status": "healthy", "version": _VERSION}
            info = await self._models.describe_sampler(identity.tenant)
            newest = await self._newest(identity.tenant)
            return {
                "status": "unhealthy" if info.refusal else "healthy",
                "gpu_count": None,
                "model": info.model.name,
                "step": newest.step if newest else 0,
                "inference_backend": info.engine,
                "version": _VERSION,
            }

        @router.post("/lora/create")
        async def lora_create(request: Request, body: LoraCreate) -> dict[str, Any]:
            message = pb.CreateRunRequest(
                request_id=uuid4().hex,
                base_model=await self._models.served(tenant_of(request), body.base_model),
                lora=lora_pb2.LoraConfig(rank=body.rank),
                user_metadata=API,
            )
            with _named_as_here():
                made = await self._services.call(tenant_of(request), message, pb.CreateRunResponse, seconds=_SECONDS)
            return {
                "session_id": made.run.run_id,
                "status": "ready",
                "model": made.run.base_model,
                "rank": made.run.lora.rank,
                "trainable_params": f"{made.run.trainable_parameters / 1e6:.2f}M",
            }

        @router.post("/weights/save")
        async def weights_save(request: Request, body: WeightsSave) -> dict[str, Any]:
            # MetaClaw's server swaps the adapter on a save, so the weights are published at once.
            commands = (
                (_save(body.name, pb.CHECKPOINT_KIND_SAMPLER), pb.SaveCheckpointResponse),
                (pb.PublishWeightsRequest, pb.PublishWeightsResponse),
            )

            def saved(session: _Session, reply: pb.SaveCheckpointResponse, _: Message) -> dict[str, Any]:
                return {"status": "ok", "adapter_path": reply.checkpoint.path, "step": session.step}

            return await while_connected(request, self._send(tenant_of(request), body.session_id, commands, saved))

        @router.post("/checkpoint/save")
        async def checkpoint_save(request: Request, body: CheckpointSave) -> dict[str, str]:
            commands = ((_save(body.name, pb.CHECKPOINT_KIND_STATE), pb.SaveCheckpointResponse),)

            def saved(_: _Session, reply: pb.SaveCheckpointResponse) -> dict[str, str]:
                return {"status": "ok", "path": reply.checkpoint.path}

            return await while_connected(request, self._send(tenant_of(request), body.session_id, commands, saved))

        @router.post("/checkpoint/load")
        async def checkpoint_load(request: Request, body: CheckpointLoad) -> dict[str, Any]:
            make = partial(pb.LoadCheckpointRequest, path=body.path, with_optimizer=True)
            commands = ((make, pb.LoadCheckpointResponse),)

            def loaded(session: _Session, reply: pb.LoadCheckpointResponse) -> dict[str, Any]:
                session.step = reply.run.step
                return {"status": "ok", "step": reply.run.step}

            return await while_connected(request, self._send(tenant_of(request), body.session_id, commands, loaded))

    def _add_training(self, router: APIRouter) -> None:
        @router.post("/train/forward_backward")
        async def forward_backward(request: Request, body: ForwardBackward) -> dict[str, Any]:
            if body.loss_fn not in _LOSSES:
                raise errors.UnknownLoss(f"is not known; take one of {', '.join(_LOSSES)}", field="loss_fn")
            data = [_datum(datum, f"datums[{index}]") for index, datum in enumerate(body.datums)]
            config = {} if body.loss_fn == "importance_sampling" else _CLIPPED
            loss: dict[str, Any] = {"loss_fn": body.loss_fn, "loss_fn_config": config}
            make = partial(pb.ForwardBackwardRequest, data=data, **loss, refuse_non_finite=True)
            tokens = sum(max(1, int(np.count_nonzero(datum.advantages))) for datum in body.datums)

            def computed(session: _Session, reply: pb.ForwardBackwardResponse) -> dict[str, Any]:
                mean = reply.metrics["loss:sum"] / len(data)
                session.losses.append(mean)
                return {"status": "ok", "loss": mean, "total_tokens": tokens, "num_datums": len(data)}

            commands = ((make, pb.ForwardBackwardResponse),)
            return await while_connected(request, self._send(tenant_of(request), body.session_id, commands, computed))

        @router.post("/train/optim_step")
        async def optim_step(request: Request, body: OptimStep) -> dict[str, Any]:
            make = partial(pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=body.learning_rate, **_ADAMW))

            def stepped(session: _Session, reply: pb.OptimStepResponse) -> dict[str, Any]:
                losses, session.losses, session.step = session.losses, [], reply.step
                return {
                    "status": "ok",
                    "step": reply.step,
                    "grad_norm": reply.grad_norm,
                    "avg_loss": sum(losses) / len(losses) if losses else 0.0,
                    "learning_rate": reply.learning_rate,
                }

            commands = ((make, pb.OptimStepResponse),)
            return await while_connected(request, self._send(tenant_of(request), body.session_id, commands, stepped))

    async def _sample(self, tenant: str, body: Sample) -> dict[str, Any]:
        ref = await self._sampled(tenant, body.session_id)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        with sendable("tokens"):
            tokens = np.array(body.tokens, np.int64)
        info = await self._models.describe_sampler(tenant)
        left = info.model.max_context_length - len(tokens)
        params = SamplingParams(
            max_tokens=max(1, min(body.max_tokens, left)),
            temperature=body.temperature,
            top_k=max(body.top_k, 0),
            top_p=body.top_p,
            stop=stop or (),
        )
        with _named_as_here():
            result = await self._services.sample(
                tenant, ref, tokens, params, seconds=_SECONDS, num_samples=body.num_samples
            )
        return {
            "sequences": [
                {
                    "tokens": sequence.tokens.tolist(),
                    "logprobs": sequence.logprobs.tolist(),
                    "stop_reason": "stop" if sequence.stop_reason is StopReason.STOP else "length",
                }
                for sequence in result.sequences
            ],
            "version": result.model.version,
        }

    async def _sampled(self, tenant: str, run_id: str) -> ModelRef:
        """Return the weights that a session samples from: its newest version, or the base model while it has none."""
        run = await (self._models.run(tenant, run_id) if run_id else self._newest(tenant))
        return ModelRef(run_id=run.run_id) if run and run.latest_version else ModelRef()

    async def _newest(self, tenant: str) -> Run | None:
        """Return the newest run that is a session; None if there is none."""
        runs = await self._models.runs(tenant)
        return next((run for run in runs if API.items() <= run.user_metadata.items()), None)

    async def _send(
        self,
        tenant: str,
        run_id: str,
        commands: Sequence[tuple[Callable[..., Any], type[Message]]],
        conclude: Callable[..., Answer],
    ) -> Answer:
        """Send a request's commands, the next of a session; after a failure, attach again and continue from there.

        A command whose answer was lost may have executed, or will. The same request after it sends the same command,
        which executes once, and none that was answered before it. `conclude` notes in the session what the replies say,
        before the next request has its turn, and returns the answer.
        """
        session = self._known(tenant, run_id)
        async with session.turn:
            with sendable("request"):
                messages = [make(run_id=run_id) for make, _ in commands]
            digest = _digest(messages)
            if session.unanswered != digest:
                if session.unanswered:
                    session.attachment = 0
                session.replies = []
            await self._attach(tenant, run_id, session)
            session.unanswered = digest
            for message, (_, reply) in list(zip(messages, commands, strict=True))[len(session.replies) :]:
                _name(message, session)
                message.seq_id, message.attachment = session.next_seq_id, session.attachment
                try:
                    with _named_as_here():
                        session.replies.append(await self._services.call(tenant, message, reply, seconds=_SECONDS))
                except BaseException as error:
                    if not _is_open(error):
                        session.attachment, session.unanswered = 0, b""
                    raise
                session.next_seq_id += 1
            replies, session.replies, session.unanswered = session.replies, [], b""
            return conclude(session, *replies)

    async def _attach(self, tenant: str, run_id: str, session: _Session) -> None:
        """Attach a session to its run unless it is. The caller holds its turn. Raises RunNotFound."""
        if session.attachment:
            return
        request = pb.AttachRunRequest(run_id=run_id, request_id=uuid4().hex)
        try:
            reply = await self._services.call(tenant, request, pb.AttachRunResponse)
        except errors.RunNotFound as error:
            self._sessions.pop((tenant, run_id), None)
            raise errors.RunNotFound("no such session; POST /v1/lora/create", field="session_id") from error
        session.attachment, session.step = reply.attachment, reply.run.step
        session.next_seq_id = reply.run.last_seq_id + 1

    def _known(self, tenant: str, run_id: str) -> _Session:
        """Return a run's session, attached or not: the same one to all callers, who take turns."""
        key = tenant, run_id
        session = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        if (excess := len(self._sessions) - _MAX_SESSIONS) > 0:
            idle = [each for each, one in self._sessions.items() if one is not session and not one.turn.locked()]
            for each in idle[:excess]:
                del self._sessions[each]
        return session


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Name fields in errors as this API does."""
    try:
        yield
    except errors.PacelineError as error:
        for theirs, ours in _FIELDS.items():
            error.field = re.sub(theirs, ours, error.field)
        raise


def _save(name: str, kind: pb.CheckpointKind.ValueType) -> Callable[..., pb.SaveCheckpointRequest]:
    return partial(pb.SaveCheckpointRequest, name=name, kind=kind, overwrite=True)


def _name(message: Message, session: _Session) -> None:
    """Name saved weights after the session's step if the caller gave no name."""
    if isinstance(message, pb.SaveCheckpointRequest) and message.kind == pb.CHECKPOINT_KIND_SAMPLER:
        message.name = message.name or f"adapter_step_{session.step:04d}"


def _digest(messages: Sequence[Message]) -> bytes:
    digest = sha256()
    for message in messages:
        digest.update(sha256(message.SerializeToString(deterministic=True)).digest())
    return digest.digest()


def _is_open(error: BaseException) -> bool:
    """Return whether a command that failed may have executed, or may still, so that its number stays its own."""
    if isinstance(error, errors.Exhausted):
        return error.retry_after is not None  # refused, perhaps the second time after an answer was lost
    return isinstance(error, _NO_ANSWER) and not isinstance(error, errors.AckTimeout)


def _datum(datum: WireDatum, place: str) -> datum_pb2.Datum:
    """Convert a datum. Its loss is the mean over the tokens with non-zero advantage."""
    advantages = _floats(datum.advantages, f"{place}.advantages")
    counted = advantages != 0
    inputs: dict[str, Array] = {
        "target_tokens": _tokens(datum.target_tokens, f"{place}.target_tokens"),
        "logprobs": _floats(datum.logprobs, f"{place}.logprobs"),
        "advantages": advantages / np.float32(max(1, counted.sum())),
        "mask": counted.astype(np.uint8),
    }
    return datum_pb2.Datum(
        model_input=codec.tensor_to_proto(_tokens(datum.model_input_tokens, f"{place}.model_input_tokens")),
        loss_inputs={name: codec.tensor_to_proto(values) for name, values in inputs.items()},
    )


def _tokens(values: list[int], place: str) -> Array:
    with sendable(place):
        return np.array(values, np.int64)


def _floats(values: list[float], place: str) -> Array:
    with sendable(place), np.errstate(over="ignore"):
        return np.array(values, np.float32)
