"""POST /train, GET /train/status and POST /checkpoint: models trained on posted examples while they serve."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Request

from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models
from gateway.http.online.learner import Learner
from gateway.http.online.requests import DEFAULT_MODEL, CheckpointRequest, Lora, TrainRequest, read
from gateway.http.online.store import MOST_WAITING_BYTES, NewExample, OnlineModel, OnlineStore
from gateway.http.problems import is_fixable_by_caller
from gateway.http.services import Services
from paceline import errors
from paceline.client.batching import render_all
from paceline.requests.bodies import decoded
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.trainer.v1 import trainer_service_pb2 as pb

_SECONDS = 600.0
_OPTIMIZER = "apollo_mini"
Reserve = Callable[[int], None]


class OnlineApi:
    """The routes, and the learners behind them."""

    def __init__(
        self,
        services: Services,
        models: Models,
        state: Path,
        max_message_bytes: int,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        """Open the database in `state`. Raises StateUnusable or InvalidArgument if it cannot be used."""
        self._services, self._models = services, models
        self.store = OnlineStore(state / "online.sqlite", most_waiting_bytes)
        self._rendered = WaitingBytes()
        """Bytes of each tenant's examples in memory that are not stored yet."""
        self._most_bytes = max_message_bytes // 2
        self._learners: dict[int, Learner] = {}
        self._names: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks, owned while a name is given a model, or a model is given examples."""

    async def start(self) -> None:
        """Resume the work that an earlier gateway left unfinished."""
        for model in self.store.models():
            if model.run_id and not model.stopped:
                self._learner(model).wake()

    async def stop(self) -> None:
        """Stop the work in progress; the next gateway resumes it."""
        await asyncio.gather(*(learner.close() for learner in self._learners.values()))
        self.store.close()

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["online"])

        @router.post("/train", status_code=202)
        async def train(request: Request) -> dict[str, Any]:
            content = await request.body()
            given = await decoded(len(content), read, content, TrainRequest)
            return await self._train(tenant_of(request), given, len(content))

        @router.get("/train/status")
        async def status(request: Request, model: str = DEFAULT_MODEL) -> dict[str, Any]:
            return self._status(self._find(tenant_of(request), model))

        @router.post("/checkpoint")
        async def checkpoint(request: Request) -> dict[str, Any]:
            content = await request.body() or b"{}"
            body = await decoded(len(content), read, content, CheckpointRequest)
            learner = self._learner(self._find(tenant_of(request), body.model))
            path = await while_connected(request, learner.save(body.name))
            return {"model": body.model, "path": path, "step": learner.model.step}

        return router

    async def _train(self, tenant: str, request: TrainRequest, size: int) -> dict[str, Any]:
        with self._rendering(tenant) as reserve:
            examples = await self._examples(tenant, request, size, reserve)
            async with self._names.setdefault((tenant, request.model), asyncio.Lock()):
                learner = await self._begin(tenant, request)
                model, rate = learner.model, request.learning_rate
                added = await self.store.add_examples(model, examples, rate, request.batch_size)
                learner.wake()
        return {
            "model": request.model,
            "run_id": model.run_id,
            "accepted": added,
            "duplicates": len(examples) - added,
        }

    @contextmanager
    def _rendering(self, tenant: str) -> Iterator[Reserve]:
        """Yield a function that reserves bytes of rendered examples until the block ends.

        It raises Overloaded if too many bytes of the tenant's examples wait, those that other requests are rendering
        included. The bytes count as those of calls do, because they are in memory as well: it also raises QuotaExceeded
        or Overloaded at their limits.
        """
        counters, reserved = (self._rendered, self._services.waiting_bytes), 0

        def reserve(size: int) -> None:
            nonlocal reserved
            self.store.check_waiting(tenant, self._rendered.used(tenant) + size)
            calls = self._services.waiting_bytes
            limit = calls.limit_of(tenant)
            if limit and reserved + size > limit:  # waiting would not help
                raise errors.MessageTooLarge(
                    f"renders to more than the {limit} bytes that may wait: post fewer at a time, or have "
                    f"the operator raise {calls.raised_by(tenant)}",
                    field="conversations",
                )
            calls.check(tenant, size)
            for counter in counters:
                counter.add(tenant, size)
            reserved += size

        try:
            yield reserve
        finally:
            for counter in counters:
                counter.remove(tenant, reserved)

    async def _examples(self, tenant: str, given: TrainRequest, size: int, reserve: Reserve) -> list[NewExample]:
        """Render the conversations of a request of `size` bytes. Raises the trainer's errors and those of `reserve`."""

        async def call(request: pb.RenderConversationsRequest) -> pb.RenderConversationsResponse:
            return await self._services.call(tenant, request, pb.RenderConversationsResponse, seconds=_SECONDS)

        examples = list[NewExample]()
        try:
            async for rendered in render_all(call, await decoded(size, given.bodies)):
                data = pb.ForwardBackwardRequest(data=rendered.data).SerializeToString(deterministic=True)
                reserve(len(data))
                examples.append(NewExample(sha256(data).digest(), len(rendered.data), data))
        except errors.PacelineError as error:
            error.field = given.field_of(error.field)
            raise
        return examples

    async def _begin(self, tenant: str, request: TrainRequest) -> Learner:
        """Return the learner of a model, creating the model if it does not exist. Raises the trainer's errors.

        No sampler is asked about a model that has a run: it is trained also while none answers.
        """
        model, old = self.store.model(tenant, request.model), None
        if model is not None and model.run_id:
            _check_is_same(model, request)
            with suppress(errors.RunNotFound):
                return await self._learner(model).begin()
            model, old = None, model  # Its run was deleted, and with it the training on its examples.
        elif model is not None and _settings(request, model) != (model.optimizer, model.lora):
            model, old = None, model  # Its run was never created.
        optimizer, lora = _settings(request, model or old)
        await self._check_serves(tenant, request.model, lora)
        base_model = await self._models.served(tenant, "")
        if model is None:
            if old is not None:
                await self._close(old)
            model = await self._add_model(tenant, request.model, optimizer, lora, old)
        try:
            return await self._learner(model).begin(base_model)
        except errors.PacelineError as error:
            now = self.store.again(model)
            if is_fixable_by_caller(error) and not now.run_id and not now.waiting:
                await self._close(model)
                await self.store.forget_model(model)
            raise

    async def _add_model(
        self, tenant: str, name: str, optimizer: str, lora: Mapping[str, Any], old: OnlineModel | None
    ) -> OnlineModel:
        """Store a new model. At the tenant's limit those whose runs were deleted are forgotten, oldest first."""
        while True:
            try:
                return await self.store.add_model(tenant, name, uuid4().hex, optimizer, lora, instead_of=old)
            except errors.QuotaExceeded:
                if not await self._forget_oldest(tenant):
                    raise

    async def _forget_oldest(self, tenant: str) -> bool:
        """Forget the tenant's oldest model that has neither a run nor waiting examples; return whether there was one.

        A model that a request creates or trains just now is left alone.
        """
        # Models first: their runs were made before they were recorded, so what the later list lacks was deleted.
        models = self.store.models(tenant)
        runs = {run.run_id for run in await self._models.runs(tenant)}
        for model in models:
            turn = self._names.setdefault((tenant, model.name), asyncio.Lock())
            if model.run_id in runs or turn.locked():
                continue
            async with turn:
                now = self.store.model(tenant, model.name)
                if now != model or now.waiting:
                    continue
                await self._close(model)
                await self.store.forget_model(model)
                return True
        return False

    async def _close(self, model: OnlineModel) -> None:
        if learner := self._learners.pop(model.model_id, None):
            await learner.close()

    async def _check_serves(self, tenant: str, name: str, lora: Mapping[str, Any]) -> None:
        """Check that a sampler can serve the model under its name. Raises InvalidArgument, Unsupported."""
        info, is_lora = await self._models.describe_sampler(tenant), bool(lora)
        if name.startswith("run-") or name in self._models.base_names(info.model):
            raise errors.InvalidArgument(
                "is the base model's name, or begins with run-; choose a name of your own", field="model"
            )
        if not is_lora and info.serves == "adapters":
            raise errors.Unsupported(
                'the sampler serves adapters and no whole models: train an adapter ("lora": {"rank": 16}), or start '
                "the sampler with PACELINE_SAMPLER_SERVES=models",
                field="lora",
            )
        if is_lora and info.serves == "models":
            raise errors.Unsupported(
                "the sampler serves whole models and no adapters: train all parameters, by a model without lora, or "
                "start the sampler without PACELINE_SAMPLER_SERVES=models",
                field="lora",
            )
        if is_lora and lora["rank"] > (most := info.model.max_lora_rank):
            message = f"is {lora['rank']}; the sampler serves at most {most} (PACELINE_SAMPLER_MAX_LORA_RANK)"
            raise errors.RankTooLarge(message, field="lora.rank")

    def _find(self, tenant: str, name: str) -> OnlineModel:
        model = self.store.model(tenant, name)
        if model is None or not model.run_id:
            yours = ", ".join(sorted(each.name for each in self.store.models(tenant))) or "none"
            message = f"no such model: {name[:64]}; POST /train creates one, and yours are: {yours[:500]}"
            raise errors.ModelNotFound(message, field="model")
        return model

    def _learner(self, model: OnlineModel) -> Learner:
        if model.model_id not in self._learners:
            self._learners[model.model_id] = Learner(self._services, self.store, model, self._most_bytes)
        return self._learners[model.model_id]

    def _status(self, model: OnlineModel) -> dict[str, Any]:
        learner = self._learner(model)
        return {
            "model": model.name,
            "run_id": model.run_id,
            "state": "stopped" if model.stopped else "training" if learner.is_busy else "idle",
            "optimizer": model.optimizer,
            "lora": model.lora or None,
            "waiting": model.waiting,
            "trained": model.trained,
            "failed": model.failed,
            "step": model.step,
            "version": model.version or None,
            "loss": model.loss if model.loss is not None and math.isfinite(model.loss) else None,
            "tokens": model.tokens,
            "problem": model.stopped or learner.problem or model.problem or None,
        }


def _lora(lora: Lora | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = msgspec.to_builtins(lora) if lora else {}
    return found


def _settings(request: TrainRequest, old: OnlineModel | None) -> tuple[str, Mapping[str, Any]]:
    """Return the optimizer and the adapter settings of a request's model.

    What the request omits is as in `old`, if that had a run or has examples that wait for one.
    """
    kept = old if old is not None and (old.run_id or old.waiting) else None
    optimizer = request.optimizer or (kept.optimizer if kept else _OPTIMIZER)
    return optimizer, _lora(request.lora) or (kept.lora if kept else {})


def _check_is_same(model: OnlineModel, request: TrainRequest) -> None:
    """Check that a request keeps the model's optimizer and adapter settings. Raises InvalidArgument."""
    if request.optimizer is not None and request.optimizer != model.optimizer:
        message = (
            f"{model.name} was created with {model.optimizer}, which cannot change; leave it out, or name another model"
        )
        raise errors.InvalidArgument(message, field="optimizer")
    if request.lora is not None and _lora(request.lora) != model.lora:
        own = f"trains an adapter, {json.dumps(model.lora)}," if model.lora else "trains all parameters,"
        message = f"{model.name} {own} which cannot change; leave it out, or name another model"
        raise errors.InvalidArgument(message, field="lora")
