"""The control plane: models, runs, checkpoints and sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse
from pydantic import Field

from gateway.http.json_bodies import JsonRoute
from gateway.http.middleware import identity_of, tenant_of
from gateway.http.models import Models
from gateway.http.services import Services
from gateway.http.tinker.downloads import ARCHIVE, Downloads
from gateway.http.tinker.names import TYPES, Names, model_of, split
from gateway.http.tinker.sessions import Sessions
from gateway.http.tinker.store import Model, Store, save_of
from gateway.http.tinker.training import Body
from paceline import errors
from paceline.layout import CheckpointPath
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind

_MAX_LIMIT = 10_000
_MAX_OFFSET = 10**12
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{name}"
T = TypeVar("T")


class Ttl(Body):
    """Request to set a checkpoint's TTL."""

    ttl_seconds: int | None = Field(None, ge=1, le=2**63)
    """The trainer has the highest number that it accepts."""


class OfPath(Body):
    """A request that names a checkpoint."""

    tinker_path: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """Answers from the trainer's lists, in Tinker's format."""

    services: Services
    store: Store
    names: Names
    models: Models
    sessions: Sessions
    downloads: Downloads

    def routes(self) -> APIRouter:
        """Return the routes below /api/v1."""
        router = APIRouter(route_class=JsonRoute)
        self._add_models(router)
        self._add_runs(router)
        self._add_checkpoints(router)
        self._add_sessions(router)
        return router

    def _add_models(self, router: APIRouter) -> None:
        @router.get("/get_server_capabilities")
        async def get_server_capabilities(request: Request) -> dict[str, Any]:
            tenant = tenant_of(request)
            info = (await self.models.describe_sampler(tenant)).model
            context = info.max_context_length
            models = [
                {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
                for name in self.models.base_names(info)
            ]
            return {"supported_models": models}

        @router.post("/weights_info")
        async def weights_info(request: Request, body: OfPath) -> dict[str, Any]:
            tenant = tenant_of(request)
            path = self.names.checkpoint(tenant, body.tinker_path, "tinker_path")
            await self.downloads.files(tenant, path)
            model = self.store.model_of_run(path.run_id)
            if model is None:
                model = model_of(await self.models.run(tenant, path.run_id))
            return {
                "base_model": model.base_model,
                "is_lora": bool(model.lora),
                "lora_rank": model.lora.get("rank"),
                **{name: model.lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")},
                "optimizer_config": {"type": "adamw"},
            }

    def _add_runs(self, router: APIRouter) -> None:
        @router.get("/training_runs")
        async def training_runs(
            request: Request, limit: int = Query(20, ge=1, le=_MAX_LIMIT), offset: int = Query(0, ge=0, le=_MAX_OFFSET)
        ) -> dict[str, Any]:
            tenant = tenant_of(request)
            listed = [*self.store.models(tenant)]
            known = {model.run_id for model in listed}
            listed += [model_of(run) for run in await self.models.runs(tenant) if run.run_id not in known]
            page, cursor = _page(listed, limit, offset)
            checkpoints = await self.models.checkpoints(tenant)
            return {"training_runs": self._training_runs(tenant, page, checkpoints), "cursor": cursor}

        @router.get("/training_runs/{model_id}")
        async def training_run(request: Request, model_id: str) -> dict[str, Any]:
            tenant = tenant_of(request)
            if model_id.startswith("run-"):
                model = model_of(await self.models.run(tenant, model_id))
            else:
                model = self.names.model(tenant, model_id)
            checkpoints = await self.models.checkpoints(tenant, model.run_id)
            (run,) = self._training_runs(tenant, [model], checkpoints)
            return run

    def _add_checkpoints(self, router: APIRouter) -> None:
        @router.get("/checkpoints")
        async def checkpoints(
            request: Request, limit: int = Query(100, ge=1, le=_MAX_LIMIT), offset: int = Query(0, ge=0, le=_MAX_OFFSET)
        ) -> dict[str, Any]:
            tenant = tenant_of(request)
            page, cursor = _page(await self.models.checkpoints(tenant), limit, offset)
            return {"checkpoints": self._all_as_json(tenant, page), "cursor": cursor}

        @router.get("/training_runs/{model_id}/checkpoints")
        async def checkpoints_of(request: Request, model_id: str) -> dict[str, Any]:
            tenant = tenant_of(request)
            found = await self.models.checkpoints(tenant, self.names.run_of(tenant, model_id))
            return {"checkpoints": self._all_as_json(tenant, found)}

        @router.delete("/training_runs/{model_id}/checkpoints/{folder}/{name}", status_code=204)
        async def delete(request: Request, model_id: str, folder: str, name: str) -> None:
            tenant = tenant_of(request)
            path = self.names.named(tenant, model_id, folder, name)
            await self.services.call(tenant, pb.DeleteCheckpointRequest(path=str(path)), pb.DeleteCheckpointResponse)

        @router.put("/training_runs/{model_id}/checkpoints/{folder}/{name}/ttl", status_code=204)
        async def set_ttl(request: Request, model_id: str, folder: str, name: str, body: Ttl) -> None:
            tenant = tenant_of(request)
            path = self.names.named(tenant, model_id, folder, name)
            message = pb.SetCheckpointTtlRequest(path=str(path), ttl_seconds=body.ttl_seconds)
            await self.services.call(tenant, message, pb.SetCheckpointTtlResponse)

        @router.get("/training_runs/{model_id}/checkpoints/{folder}/{name}/external_weights_urls")
        async def external_weights_urls(request: Request, model_id: str, folder: str, name: str) -> dict[str, Any]:
            tenant = tenant_of(request)
            path = self.names.named(tenant, model_id, folder, name)
            addresses = {
                file: self.downloads.address(request, identity_of(request), path, file)
                for file in await self.downloads.files(tenant, path)
            }
            expires = min(moment for _, moment in addresses.values())
            return {"urls": {file: address for file, (address, _) in addresses.items()}, "expires": expires}

        @router.get("/training_runs/{model_id}/checkpoints/{folder}/{name}/archive")
        async def archive(request: Request, model_id: str, folder: str, name: str) -> RedirectResponse:
            tenant = tenant_of(request)
            path = self.names.named(tenant, model_id, folder, name)
            await self.downloads.files(tenant, path)
            address, expires = self.downloads.address(request, identity_of(request), path, ARCHIVE)
            headers = {"Expires": expires.strftime("%a, %d %b %Y %H:%M:%S GMT")}
            return RedirectResponse(address, 302, headers)

        async def without_folder(model_id: str, name: str) -> None:
            message = f"{name[:99]} is not a checkpoint's id, which begins with one of {', '.join(TYPES)} and a slash"
            raise errors.InvalidPath(message, field="checkpoint_id")

        router.add_api_route(_CHECKPOINT, without_folder, methods=["DELETE"])
        for method, call in (("PUT", "ttl"), ("GET", "archive"), ("GET", "external_weights_urls")):
            router.add_api_route(f"{_CHECKPOINT}/{call}", without_folder, methods=[method], name=f"{call} by name")

    def _add_sessions(self, router: APIRouter) -> None:
        @router.get("/sessions")
        async def sessions(
            request: Request, limit: int = Query(20, ge=1, le=_MAX_LIMIT), offset: int = Query(0, ge=0, le=_MAX_OFFSET)
        ) -> dict[str, list[str]]:
            return {"sessions": self.store.session_ids(tenant_of(request), limit, offset)}

        @router.get("/sessions/{session_id}")
        async def session(request: Request, session_id: str) -> dict[str, Any]:
            tenant = tenant_of(request)
            found = self.sessions.get(tenant, session_id)
            metadata = found.user_metadata.get("user_metadata") or {}
            return {
                "training_run_ids": [model.model_id for model in self.store.models(tenant, session_id)],
                "sampler_ids": self.store.samplers(session_id),
                "user_metadata": {name: str(value) for name, value in metadata.items()},
                "display_name": found.display_name,
            }

    def _training_runs(
        self, tenant: str, models: Iterable[Model], checkpoints: Iterable[Checkpoint]
    ) -> list[dict[str, Any]]:
        attached, newest = self.store.checkpoint_metadata(tenant), dict[tuple[str, CheckpointKind], Checkpoint]()
        for checkpoint in checkpoints:
            newest.setdefault((checkpoint.run_id, checkpoint.kind), checkpoint)

        def last(model: Model, kind: CheckpointKind) -> dict[str, Any] | None:
            found = newest.get((model.run_id, kind))
            return self._as_json(found, attached) if found else None

        return [
            self._training_run(model, last(model, CheckpointKind.STATE), last(model, CheckpointKind.SAMPLER))
            for model in models
        ]

    def _training_run(
        self, model: Model, state: dict[str, Any] | None, sampler: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "training_run_id": model.model_id,
            "base_model": model.base_model,
            "model_owner": model.tenant,
            "is_lora": bool(model.lora),
            "lora_rank": model.lora.get("rank"),
            "corrupted": False,
            "last_request_time": _moment(model.used),
            "last_checkpoint": state,
            "last_sampler_checkpoint": sampler,
            "user_metadata": model.user_metadata,
        }

    def _all_as_json(self, tenant: str, checkpoints: Iterable[Checkpoint]) -> list[dict[str, Any]]:
        attached = self.store.checkpoint_metadata(tenant)
        return [self._as_json(checkpoint, attached) for checkpoint in checkpoints]

    def _as_json(self, checkpoint: Checkpoint, attached: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        path = CheckpointPath.parse(checkpoint.path)
        folder, name = split(path)
        return {
            "checkpoint_id": f"{folder}/{name}",
            "checkpoint_type": TYPES[folder],
            "time": checkpoint.create_time.isoformat(),
            "tinker_path": self.names.tinker_path(path),
            "size_bytes": checkpoint.size_bytes,
            "public": False,
            "user_metadata": attached.get(save_of(checkpoint)),
            "expires_at": checkpoint.expire_time.isoformat() if checkpoint.expire_time else None,
        }


def _page(items: Sequence[T], limit: int, offset: int) -> tuple[Sequence[T], dict[str, int]]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
