"""POST /train, GET /train/status and POST /checkpoint: models that are trained on what is posted while they serve."""

from __future__ import annotations

import asyncio
import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gateway.http.models import Models
from gateway.http.online.learner import Learner
from gateway.http.online.store import ExampleState, NewExample, OnlineModel, OnlineStore
from gateway.http.services import Services
from gateway.http.tinker.api import tenant_of
from paceline import errors
from paceline.codec.conversations import counted_from, requests_to_render
from paceline.trainer.v1 import trainer_service_pb2 as pb

_SECONDS = 600.0
_DEFAULT = "online"
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_OPTIMIZER = "apollo_mini"
_MOST_WAITING_BYTES = 1 << 30
"""Of a tenant's examples that are not trained on yet."""


class Body(BaseModel):
    """A request; a field that is not known is refused, since it would change nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Conversation(Body):
    """Messages as in OpenAI's chat API; the loss is on those of the assistant."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Pair(Body):
    """A conversation of two messages."""

    prompt: str
    response: str


class Lora(Body):
    """An adapter, in place of all parameters."""

    rank: int = Field(16, ge=1, le=65536)
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)


class Train(Body):
    """Request of /train."""

    model: ModelName = _DEFAULT
    conversations: list[Conversation] = Field([], max_length=100_000)
    pairs: list[Pair] = Field([], max_length=100_000)
    learning_rate: float = Field(1e-4, ge=0, le=1e6)
    batch_size: int = Field(8, ge=1, le=256)
    optimizer: Literal["apollo_mini", "apollo", "adamw", "adamw_8bit", "adamw_cpu", "adafactor"] | None = None
    lora: Lora | None = None

    @field_validator("conversations", mode="before")
    @classmethod
    def _accept_lists(cls, given: Any) -> Any:
        """Take a list of messages for a conversation, too."""
        if not isinstance(given, list):
            return given
        return [{"messages": each} if isinstance(each, list) else each for each in given]

    def bodies(self) -> list[bytes]:
        """Return all conversations as JSON, pairs last. Raises EmptyBatch."""
        found = [each.model_dump(exclude_none=True) for each in self.conversations]
        for pair in self.pairs:
            prompt, response = {"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.response}
            found.append({"messages": [prompt, response]})
        if not found:
            raise errors.EmptyBatch("is empty, as is pairs; send one of them", field="conversations")
        return [json.dumps(each).encode() for each in found]


class Checkpoint(Body):
    """Request of /checkpoint."""

    model: ModelName = _DEFAULT
    name: str = Field("", max_length=128)


class OnlineApi:
    """The routes, and the learners behind them."""

    def __init__(self, services: Services, models: Models, state: Path) -> None:
        """Open the file of `state`. Raises InvalidArgument where it is none of ours."""
        self._services, self._models = services, models
        self._store = OnlineStore(state / "online.sqlite")
        self._learners: dict[int, Learner] = {}

    async def start(self) -> None:
        """Go on with what an earlier gateway left unfinished."""
        for model in self._store.models():
            if model.run_id and not model.stopped:
                self._learner(model).wake()

    async def stop(self) -> None:
        """End the work that is under way; another gateway goes on with it."""
        await asyncio.gather(*(learner.close() for learner in self._learners.values()))
        self._store.close()

    def routes(self) -> APIRouter:
        """Return them."""
        router = APIRouter()

        @router.post("/train", status_code=202)
        async def train(request: Request, body: Train) -> dict[str, Any]:
            return await self._train(tenant_of(request), body)

        @router.get("/train/status")
        async def status(request: Request, model: str = _DEFAULT) -> dict[str, Any]:
            return self._status(self._find(tenant_of(request), model))

        @router.post("/checkpoint")
        async def checkpoint(request: Request, body: Checkpoint) -> dict[str, Any]:
            learner = self._learner(self._find(tenant_of(request), body.model))
            path = await learner.save(body.name)
            return {"model": body.model, "path": path, "step": learner.model.step}

        return router

    async def _train(self, tenant: str, body: Train) -> dict[str, Any]:
        examples = await self._examples(tenant, body.bodies())
        size = sum(len(example.data) for example in examples)
        if self._store.waiting_bytes(tenant) + size > _MOST_WAITING_BYTES:
            message = "so many examples wait that no more are taken; send them when some are trained on"
            raise errors.Overloaded(message, field="conversations", retry_after=60.0)
        learner = await self._begin(tenant, body)
        added = await self._store.add_examples(learner.model, examples, body.learning_rate, body.batch_size)
        learner.wake()
        return {
            "model": body.model,
            "run_id": learner.model.run_id,
            "accepted": added,
            "duplicates": len(examples) - added,
        }

    async def _examples(self, tenant: str, bodies: list[bytes]) -> list[NewExample]:
        """Render conversations. Raises what the trainer raises."""
        examples = []
        for first, request in requests_to_render(bodies):
            with counted_from(first):
                reply = await self._services.call(tenant, request, pb.RenderConversationsResponse, seconds=_SECONDS)
            for rendered in reply.conversations:
                data = pb.ForwardBackwardRequest(data=rendered.data).SerializeToString(deterministic=True)
                examples.append(NewExample(sha256(data).digest(), data))
        return examples

    async def _begin(self, tenant: str, body: Train) -> Learner:
        """Return the learner of a model, which is made where there is none. Raises what the trainer raises."""
        model = self._store.model(tenant, body.model) or await self._add(tenant, body)
        _check_is_same(model, body)
        base_model = await self._models.served(tenant, "")
        try:
            learner = self._learner(model)
            await learner.begin(base_model)
        except errors.RunNotFound:  # It was deleted, and what it was trained on with it.
            self._learners.pop(model.model_id, None)
            await self._store.forget_model(model)
            learner = self._learner(await self._add(tenant, body))
            await learner.begin(base_model)
        return learner

    async def _add(self, tenant: str, body: Train) -> OnlineModel:
        info = await self._models.describe_sampler(tenant)
        if body.model.startswith("run-") or body.model in self._models.base_names(info.model):
            raise errors.InvalidArgument("is what a run or the base model may be called; take another", field="model")
        if body.lora is None and info.serves == "adapters":
            raise errors.Unsupported(
                "the sampler serves adapters and no whole models: train one, as "
                '"lora": {"rank": 16}, or start the sampler with PACELINE_SAMPLER_SERVES=models',
                field="lora",
            )
        if body.lora is not None and info.serves == "models":
            raise errors.Unsupported("the sampler serves whole models and no adapters; leave it out", field="lora")
        lora = body.lora.model_dump(exclude_none=True) if body.lora else {}
        return await self._store.add_model(tenant, body.model, uuid4().hex, body.optimizer or _OPTIMIZER, lora)

    def _find(self, tenant: str, name: str) -> OnlineModel:
        model = self._store.model(tenant, name)
        if model is None:
            raise errors.ModelNotFound(f"no such model: {name[:64]}; POST /train makes it", field="model")
        return model

    def _learner(self, model: OnlineModel) -> Learner:
        return self._learners.setdefault(model.model_id, Learner(self._services, self._store, model))

    def _status(self, model: OnlineModel) -> dict[str, Any]:
        learner, counts = self._learner(model), self._store.counts(model)
        loss = model.loss if model.loss is None or math.isfinite(model.loss) else None
        return {
            "model": model.name,
            "run_id": model.run_id,
            "state": "stopped" if model.stopped else "training" if learner.is_busy else "idle",
            "optimizer": model.optimizer,
            "lora": model.lora or None,
            "waiting": counts[ExampleState.WAITING] + counts[ExampleState.SENT],
            "trained": counts[ExampleState.TRAINED],
            "failed": counts[ExampleState.FAILED],
            "step": model.step,
            "version": model.version or None,
            "loss": loss,
            "tokens": model.tokens,
            "problem": model.stopped or learner.problem or self._store.last_problem(model) or None,
        }


def _check_is_same(model: OnlineModel, body: Train) -> None:
    """See that a model is trained as it was begun. Raises InvalidArgument."""
    if body.optimizer is not None and body.optimizer != model.optimizer:
        message = f"is {model.optimizer} for this model; leave it out, or name another model"
        raise errors.InvalidArgument(message, field="optimizer")
    if body.lora is not None and body.lora.model_dump(exclude_none=True) != model.lora:
        own = json.dumps(model.lora) if model.lora else "not used"
        message = f"is {own} for this model; leave it out, or name another model"
        raise errors.InvalidArgument(message, field="lora")
