"""MetaClaw's remote training API, below /v1. A session is a run; a save is a checkpoint or a version.

Its JSON and its defaults are kept: a datum's loss is the mean over its tokens with non-zero advantage, and losses are
summed over datums; AdamW has betas 0.9 and 0.999, eps 1e-8, weight decay 0.01, and gradients are clipped to norm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from google.protobuf.message import Message

from gateway.http.json_bodies import JsonRoute
from gateway.http.metaclaw.bodies import (
    CheckpointLoad,
    CheckpointSave,
    LoraCreate,
    OptimStep,
    Sample,
    TrainerBatch,
    WeightsSave,
    named_as_here,
)
from gateway.http.metaclaw.sessions import SECONDS, Commands, Session, Sessions
from gateway.http.metaclaw.store import UnansweredRequests
from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models
from gateway.http.services import Services
from paceline.client.batching import sendable
from paceline.requests.bodies import decoded
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import ModelRef, Run, SamplingParams, StopReason
from paceline.types.v1 import lora_pb2

API = {"api": "metaclaw"}
"""Metadata of runs that are sessions of this API."""
_CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
_CHAT = {"temperature": 0.7, "top_k": 50, "top_p": 0.95}
_CHAT_TOKENS, _SAMPLE_TOKENS = 4096, 2048
_VERSION = "0.1.0"
Answer = TypeVar("Answer")


class MetaClawApi:
    """The routes below /v1."""

    def __init__(self, services: Services, models: Models, state: Path) -> None:
        """Open the database in `state`. Raises StateUnusable or InvalidArgument if it cannot be used."""
        self._services = services
        self._models = models
        self.store = UnansweredRequests(state / "metaclaw.sqlite")
        self.sessions = Sessions(services, self.store)

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/v1", route_class=JsonRoute, tags=["metaclaw"])
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
        given = {field: value for field, value in body.items() if value is not None}
        if given.keys().isdisjoint({"max_tokens", "max_completion_tokens"}):
            info = await self._models.describe_sampler(tenant)
            given["max_tokens"] = min(_CHAT_TOKENS, info.model.max_context_length - 1)
        return name, _CHAT | given

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
            with named_as_here():
                made = await self._services.call(tenant_of(request), message, pb.CreateRunResponse, seconds=SECONDS)
            return {
                "session_id": made.run.run_id,
                "status": "ready",
                "model": made.run.base_model,
                "rank": made.run.lora.rank,
                "trainable_params": f"{made.run.trainable_parameters / 1e6:.2f}M",
                **({"warnings": list(made.warnings)} if made.warnings else {}),
            }

        @router.post("/weights/save")
        async def weights_save(request: Request, body: WeightsSave) -> dict[str, Any]:
            # MetaClaw's server swaps the adapter on a save, so the weights are published at once.
            save, publish = _save(body.name, pb.CHECKPOINT_KIND_SAMPLER), pb.PublishWeightsRequest
            # A name that is given is checked before anything changes. One that is made from the step of the weights
            # needs the answer to a command of these weights: earlier commands may still be outstanding.
            commands: Commands = (save, publish) if body.name else (publish, save)

            def saved(_: Session, *replies: Message) -> dict[str, Any]:
                (made,) = (reply.checkpoint for reply in replies if isinstance(reply, pb.SaveCheckpointResponse))
                return {"status": "ok", "adapter_path": made.path, "step": made.step}

            return await self._send(request, body.session_id, commands, saved)

        @router.post("/checkpoint/save")
        async def checkpoint_save(request: Request, body: CheckpointSave) -> dict[str, str]:
            commands = [_save(body.name, pb.CHECKPOINT_KIND_STATE)]

            def saved(_: Session, reply: pb.SaveCheckpointResponse) -> dict[str, str]:
                return {"status": "ok", "path": reply.checkpoint.path}

            return await self._send(request, body.session_id, commands, saved)

        @router.post("/checkpoint/load")
        async def checkpoint_load(request: Request, body: CheckpointLoad) -> dict[str, Any]:
            make = partial(pb.LoadCheckpointRequest, path=body.path, with_optimizer=True)

            def loaded(session: Session, reply: pb.LoadCheckpointResponse) -> dict[str, Any]:
                session.step, session.losses = reply.run.step, []
                return {"status": "ok", "step": reply.run.step}

            return await self._send(request, body.session_id, [make], loaded)

    def _add_training(self, router: APIRouter) -> None:
        @router.post("/train/forward_backward")
        async def forward_backward(request: Request) -> dict[str, Any]:
            content = await request.body()
            body = await decoded(len(content), TrainerBatch.read, content)
            config = {} if body.loss_fn == "importance_sampling" else _CLIPPED
            loss: dict[str, Any] = {"loss_fn": body.loss_fn, "loss_fn_config": config}
            make = partial(pb.ForwardBackwardRequest, data=body.data, **loss, refuse_non_finite=True)

            def computed(session: Session, reply: pb.ForwardBackwardResponse) -> dict[str, Any]:
                mean = reply.metrics["loss:sum"] / len(body.data)
                session.losses.append(mean)
                return {"status": "ok", "loss": mean, "total_tokens": body.tokens, "num_datums": len(body.data)}

            return await self._send(request, body.session_id, [make], computed)

        @router.post("/train/optim_step")
        async def optim_step(request: Request, body: OptimStep) -> dict[str, Any]:
            make = partial(pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=body.learning_rate, **_ADAMW))

            def stepped(session: Session, reply: pb.OptimStepResponse) -> dict[str, Any]:
                losses, session.losses, session.step = session.losses, [], reply.step
                return {
                    "status": "ok",
                    "step": reply.step,
                    "grad_norm": reply.grad_norm,
                    "avg_loss": sum(losses) / len(losses) if losses else 0.0,
                    "learning_rate": reply.learning_rate,
                }

            return await self._send(request, body.session_id, [make], stepped)

    async def _send(self, request: Request, run_id: str, commands: Commands, conclude: Callable[..., Answer]) -> Answer:
        return await while_connected(request, self.sessions.send(tenant_of(request), run_id, commands, conclude))

    async def _sample(self, tenant: str, body: Sample) -> dict[str, Any]:
        ref = await self._sampled(tenant, body.session_id)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        with sendable("tokens"):
            tokens = np.array(body.tokens, np.int64)
        info = await self._models.describe_sampler(tenant)
        left = info.model.max_context_length - len(tokens)
        params = SamplingParams(
            max_tokens=body.max_tokens or max(1, min(_SAMPLE_TOKENS, left)),
            temperature=body.temperature,
            top_k=max(body.top_k, 0),
            top_p=body.top_p,
            stop=stop or (),
        )
        with named_as_here():
            result = await self._services.sample(
                tenant, ref, tokens, params, seconds=SECONDS, num_samples=body.num_samples
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


def _save(name: str, kind: pb.CheckpointKind.ValueType) -> Callable[..., pb.SaveCheckpointRequest]:
    return partial(pb.SaveCheckpointRequest, name=name, kind=kind, overwrite=True)
