"""The commands of a model: each becomes a command of its run, in the order of their seq_ids."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import time
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gateway.http.services import Services, is_unread
from gateway.http.tinker import tensors
from gateway.http.tinker.futures import PROTOBUF, Futures, Kind, Posted, Result
from gateway.http.tinker.names import Aliases, Names, external_name, model_of
from gateway.http.tinker.retirement import Retirement
from gateway.http.tinker.store import Sampler, Store
from gateway.http.tinker.tidying import Tidying
from paceline import codec, errors
from paceline.background import Background, uninterrupted
from paceline.client.batching import sendable
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.requests.bodies import decoded
from paceline.requests.user_metadata import check_user_metadata
from paceline.tinker.v1 import tinker_pb2
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.v1 import lora_pb2

_log = get_logger(__name__)
_SECONDS = 600.0
MAX_NUMBER = 10**15 - 2
"""Highest number of a command, a model or a sampler."""
MAX_NAME = 1024
"""Most characters of a model's name or path: they are kept."""
Request = TypeVar("Request", bound=BaseModel)
_SERVED_LOSSES = "cross_entropy, importance_sampling, ppo, cispo, dro, gspo and grpo are"
_UNSERVED_LOSSES = {
    "stable_reinforce": f"stable_reinforce is not served, since its formula is not public; {_SERVED_LOSSES}",
    "custom": f"a loss that runs on the server is not served; forward_backward_custom runs it, or {_SERVED_LOSSES}",
}


class Body(BaseModel):
    """A request in JSON. Fields that the SDK sends and the gateway does not need are ignored.

    NaN and infinity are stored as such, since null would be read as a field that is not set. Types are JSON's: true is
    no number, and neither is "2".
    """

    model_config = ConfigDict(
        extra="ignore", strict=True, protected_namespaces=(), populate_by_name=True, ser_json_inf_nan="constants"
    )


class Lora(Body):
    """An adapter, and which weights it covers."""

    rank: int = Field(ge=1, le=65536)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The optimizer of a model."""

    type: str = "adamw"


class CreateModel(Body):
    """Request of create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=MAX_NUMBER)
    base_model: str = Field("", max_length=MAX_NAME)
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class LoadWeights(Body):
    """Request of load_weights, into a model or into a new one."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, le=MAX_NUMBER)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, le=MAX_NUMBER)
    base_model: str | None = Field(None, max_length=MAX_NAME)
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None


class Adam(Body):
    """Settings of a step; omitted ones take the trainer's defaults, which are Tinker's."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None


class OptimStep(Body):
    """Request of optim_step."""

    model_id: str
    seq_id: int = Field(ge=1, le=MAX_NUMBER)
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """Request of save_weights, save_weights_external and, with a path, of save_weights_for_sampler."""

    model_id: str
    seq_id: int = Field(ge=1, le=MAX_NUMBER)
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class SaveForSampler(SaveWeights):
    """Request of save_weights_for_sampler; without a path the weights become a version and a sampler."""

    sampling_session_seq_id: int | None = Field(None, ge=0, le=MAX_NUMBER)
    kind: str = "snapshot"


class OfModel(Body):
    """A request that names a model."""

    model_id: str


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the id that the SDK expects a model to have."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampler_seq_id: int) -> str:
    """Return the id of a session's sampler."""
    return f"{session_id}:sample:{sampler_seq_id}"


class Training:
    """Executes each kind of training work."""

    def __init__(
        self,
        services: Services,
        store: Store,
        names: Names,
        aliases: Aliases,
        retirement: Retirement,
        tidying: Tidying,
        futures: Futures,
        max_message_bytes: int,
    ) -> None:
        """Register the kinds of work with `futures`."""
        self._services = services
        self._store = store
        self._names = names
        self._aliases = aliases
        self._retirement = retirement
        self._tidying = tidying
        self._max_message_bytes = max_message_bytes
        self._changes = Background("a model was not created")

        def kind(name: str, body: type[Request], run: Callable[[str, Request], Awaitable[Result]]) -> Kind[Request]:
            def dump(request: Request) -> bytes:
                return request.model_dump_json(by_alias=True).encode()

            async def run_posted(tenant: str, posted: Posted[Request]) -> Result:
                return await run(tenant, posted.request)

            return futures.add(Kind(name, dump, body.model_validate_json, run_posted))

        self.create_model = kind("create_model", CreateModel, self._create_model)
        self.load_weights = kind("load_weights", LoadWeights, self._load_weights)
        self.optim_step = kind("optim_step", OptimStep, self._optim_step)
        save = partial(self._save, kind=pb.CHECKPOINT_KIND_STATE, type_name="save_weights")
        self.save_weights = kind("save_weights", SaveWeights, save)
        self.save_external = kind("save_weights_external", SaveWeights, self._save_external)
        self.save_for_sampler = kind("save_weights_for_sampler", SaveForSampler, self._save_for_sampler)
        self.unload_model = kind("unload_model", OfModel, self._unload_model)
        load = tinker_pb2.ForwardBackwardRequest.FromString
        self.forward_backward = futures.add(Kind("forward_backward", _bytes_of, load, self._forward_backward))

    async def _create_model(self, tenant: str, request: CreateModel) -> Result:
        _check_optimizer(request.optimizer_config)
        lora = request.lora_config or Lora(rank=32)
        message = pb.CreateRunRequest(
            base_model=self._aliases.served(request.base_model),
            lora=lora_pb2.LoraConfig(**lora.model_dump(exclude_none=True)),
            user_metadata=_texts(request.user_metadata),
            unembed_if_served=True,  # The SDK asks for the head unless it is told not to.
        )
        model_id = model_id_of(request.session_id, request.model_seq_id)
        await self._make_model(tenant, model_id, request.session_id, request.base_model, message, first_seq_id=1)
        return Result.of({"model_id": model_id, "type": "create_model"})

    async def _load_weights(self, tenant: str, request: LoadWeights) -> Result:
        if request.model_id is None:
            return await self._create_from(tenant, request)
        make = partial(self._load_request, tenant, request)
        await self._store.reload_model(request.model_id)
        await self._send(tenant, request.model_id, request.seq_id or 1, make)
        return Result.of({"path": request.path, "model_id": request.model_id, "type": "load_weights"})

    async def _create_from(self, tenant: str, request: LoadWeights) -> Result:
        """Create a model like that of a checkpoint's run; command 1 of the new run loads the checkpoint's weights."""
        load = self._load_request(tenant, request, "", 1)
        run_id = CheckpointPath.parse(load.path).run_id
        like = pb.CreateRunRequest(
            base_model=self._aliases.served(request.base_model or ""),
            like_checkpoint=load.path,
            user_metadata=_texts(request.user_metadata),
        )
        session_id, origin = request.session_id or "", self._store.model_of_run(run_id)
        model_id = model_id_of(session_id, request.model_seq_id or 0)
        base_model = request.base_model or (origin.base_model if origin else "")
        load.run_id = await self._make_model(tenant, model_id, session_id, base_model, like, first_seq_id=2)
        await self._services.execute(tenant, load, seconds=_SECONDS)
        return Result.of({"path": request.path, "model_id": model_id, "type": "load_weights"})

    def _load_request(self, tenant: str, request: LoadWeights, run_id: str, seq_id: int) -> pb.LoadCheckpointRequest:
        if request.weights_access_token:
            refusal = "weights of another account cannot be loaded; leave weights_access_token out"
            raise errors.Unsupported(refusal, field="weights_access_token")
        _check_optimizer(request.optimizer_config)
        path = self._names.checkpoint(tenant, request.path)
        return pb.LoadCheckpointRequest(run_id=run_id, seq_id=seq_id, path=str(path), with_optimizer=request.optimizer)

    async def _forward_backward(self, tenant: str, posted: Posted[tinker_pb2.ForwardBackwardRequest]) -> Result:
        def make(run_id: str, seq_id: int) -> pb.ForwardBackwardRequest:
            if (refusal := _UNSERVED_LOSSES.get(posted.request.loss_fn)) is not None:
                raise errors.UnknownLoss(refusal, field="loss_fn")
            return tensors.forward_backward_request(posted.request, run_id, seq_id)

        model_id, seq_id = posted.request.model_id, posted.request.seq_id

        async def in_thread(run_id: str, seq_id: int) -> pb.ForwardBackwardRequest:
            """Convert it in a thread: it may take a while, and must not delay other requests."""
            return await asyncio.to_thread(make, run_id, seq_id)

        reply = await self._send(tenant, model_id, seq_id, in_thread, accepted=posted.let_go)
        output = await decoded(reply.ByteSize(), tensors.forward_backward_output, reply)
        return Result(PROTOBUF, output)

    async def _optim_step(self, tenant: str, request: OptimStep) -> Result:
        def make(run_id: str, seq_id: int) -> pb.OptimStepRequest:
            if request.adam_params is None:
                _check_optimizer(Optimizer(type=str((request.optimizer_params or {}).get("type", "none"))))
            adam = request.adam_params or Adam.model_validate(request.optimizer_params)
            return pb.OptimStepRequest(
                run_id=run_id, seq_id=seq_id, adamw=pb.AdamwParams(**adam.model_dump(exclude_none=True))
            )

        reply = await self._send(tenant, request.model_id, request.seq_id, make)
        names = ("step", "grad_norm", "learning_rate", "tokens", "milliseconds")
        # Prefixed, because recipes log them beside their own metrics, one of which is `step`.
        metrics = {f"optim/{name}": float(getattr(reply, name)) for name in names}
        return Result.of({"metrics": metrics, "type": "optim_step"})

    async def _save_external(self, tenant: str, request: SaveWeights) -> Result:
        named = request.model_copy(update={"path": external_name(request.path or f"{request.seq_id:06d}")})
        return await self._save(tenant, named, pb.CHECKPOINT_KIND_SAMPLER, "save_weights_external")

    async def _save_for_sampler(self, tenant: str, request: SaveForSampler) -> Result:
        if request.path is not None or request.sampling_session_seq_id is None:
            return await self._save(tenant, request, pb.CHECKPOINT_KIND_SAMPLER, "save_weights_for_sampler")
        reply = await self._send(tenant, request.model_id, request.seq_id, pb.PublishWeightsRequest)
        model = self._names.model(tenant, request.model_id)
        sampler_id = sampler_id_of(model.session_id, request.sampling_session_seq_id)
        # "inflight" allows any version that is not older.
        version = None if request.kind == "inflight" else reply.model.version
        sampler = Sampler(sampler_id, tenant, model.session_id, model.base_model, model.run_id, version)
        await self._store.add_sampler(sampler)
        return Result.of({"path": None, "sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

    async def _save(
        self, tenant: str, request: SaveWeights, kind: pb.CheckpointKind.ValueType, type_name: str
    ) -> Result:
        def make(run_id: str, seq_id: int) -> pb.SaveCheckpointRequest:
            if request.age_encryption_recipients:
                message = "files are not encrypted here; leave it out and download over TLS"
                raise errors.Unsupported(message, field="age_encryption_recipients")
            check_user_metadata(request.user_metadata or {})
            return pb.SaveCheckpointRequest(
                run_id=run_id,
                seq_id=seq_id,
                name=request.path or f"{request.seq_id:06d}",
                kind=kind,
                ttl_seconds=request.ttl_seconds,
                overwrite=request.overwrite,
            )

        reply = await self._send(tenant, request.model_id, request.seq_id, make)
        saved = codec.checkpoint_from_proto(reply.checkpoint)
        if request.user_metadata:
            rows = await self._store.keep_checkpoint_metadata(saved, tenant, request.user_metadata)
            self._tidying.added(tenant, rows)
        path = self._names.tinker_path(CheckpointPath.parse(saved.path))
        return Result.of({"path": path, "size_bytes": saved.size_bytes, "type": type_name})

    async def _send(
        self,
        tenant: str,
        model_id: str,
        seq_id: int,
        make: Callable[..., Any],
        accepted: Callable[[], None] | None = None,
    ) -> Any:
        """Send a command of a model's run, made with its run_id and seq_id, and return its reply.

        If `make` refuses it, or it is turned away unread, send one that the trainer refuses instead: otherwise the
        commands after it would wait for its seq_id. Raises SeqIdGap, whose metadata names the missing command by its
        number in the model. `accepted` is called once the command is durable.
        """
        model = self._names.model(tenant, model_id)
        place: Any = {"run_id": model.run_id, "seq_id": model.first_seq_id + seq_id - 1}
        is_made = False
        try:
            with sendable("request"):
                message = make(**place)
                if isinstance(message, Awaitable):
                    message = await message
            if (size := message.ByteSize()) > self._max_message_bytes:
                raise errors.MessageTooLarge(f"is {size} bytes; at most {self._max_message_bytes} are accepted")
            is_made = True
            executing = self._services.execute(tenant, message, seconds=_SECONDS, accepted=accepted)
            del message  # which may be large
            return await executing
        except errors.SeqIdGap as gap:
            if "missing" in gap.metadata:
                gap.metadata["missing"] = str(int(gap.metadata["missing"]) - model.first_seq_id + 1)
            raise
        except errors.PacelineError as error:
            if not is_made or is_unread(error):
                refused = pb.ForwardBackwardRequest(**place)
                with suppress(errors.InvalidArgument, errors.SeqIdReused):
                    await self._services.execute(tenant, refused, seconds=_SECONDS)
            raise

    async def _unload_model(self, tenant: str, request: OfModel) -> Result:
        model = self._names.model(tenant, request.model_id)
        await self._retirement.delete(model)
        return Result.of({"model_id": model.model_id, "type": "unload_model"})

    async def close(self) -> None:
        """Stop what goes on although its work was cancelled; the next gateway repeats it."""
        await self._changes.close()

    @uninterrupted  # otherwise work that is cancelled could leave a run that no model names
    async def _make_model(
        self,
        tenant: str,
        model_id: str,
        session_id: str,
        base_model: str,
        message: pb.CreateRunRequest,
        first_seq_id: int,
    ) -> str:
        """Create a model's run, once, and return its id."""
        if (known := self._store.model(model_id)) is not None:
            return known.run_id
        message.request_id = hashlib.sha256(model_id.encode()).hexdigest()
        create = partial(self._services.call, tenant, message, pb.CreateRunResponse, seconds=_SECONDS)
        made = await self._create_in_limit(tenant, create)
        for warning in made.warnings:
            _log.warning("model not served as asked", model=model_id, run=made.run.run_id, warning=warning)
        run = model_of(codec.run_from_proto(made.run))
        now = time()
        model = replace(
            run,
            model_id=model_id,
            tenant=tenant,
            session_id=session_id,
            base_model=base_model or run.base_model,
            first_seq_id=first_seq_id,
            created=now,
            used=now,
        )
        self._tidying.added(tenant, await self._store.add_model(model))
        return model.run_id

    async def _create_in_limit(
        self, tenant: str, create: Callable[[], Awaitable[pb.CreateRunResponse]]
    ) -> pb.CreateRunResponse:
        """Create a run. At the tenant's limit, the runs of sessions that are over go at once, oldest first."""
        while True:
            try:
                return await create()
            except errors.TooManyRuns:
                if not await self._retirement.delete_oldest(tenant):
                    raise


def _bytes_of(batch: tinker_pb2.ForwardBackwardRequest) -> bytes:
    """Return the same bytes for the same batch in every process; otherwise the order of maps differs between them."""
    return batch.SerializeToString(deterministic=True)


def _texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    check_user_metadata(metadata or {})
    return {name: value if isinstance(value, str) else str(value) for name, value in (metadata or {}).items()}


def _check_optimizer(optimizer: Optimizer | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        message = f"{optimizer.type[:40]} is not served over this API; use AdamW"
        raise errors.Unsupported(message, field="optimizer")
