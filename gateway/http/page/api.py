"""GET /ui/api/...: what the page shows, as JSON. Thin over the contracts; a caller sees what its tenant may see."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from gateway.deployment import Deployment
from gateway.http.middleware import identity_of, tenant_of
from gateway.http.models import Models
from gateway.http.page.files import PREFIX
from gateway.http.problems import last_event
from gateway.http.run_names import NAME
from gateway.http.services import Services
from gateway.http.streaming import EVENTS, StreamedResponse
from paceline import codec, errors
from paceline.codec.metrics import metrics_row_from_proto, rollout_row_from_proto
from paceline.codec.status import (
    disk_from_proto,
    held_from_proto,
    model_from_proto,
    service_from_proto,
    waiting_from_proto,
)
from paceline.metrics.v1 import metrics_service_pb2 as metrics_pb
from paceline.requests.bodies import decoded
from paceline.rpc.identity import Identity
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Run
from paceline.types.status import Disk, Held, Status, Waiting

_MOST_RUNS = 500
"""Newest runs that are listed."""
_WATCH_SECONDS = 300.0
"""How long a stream of rows lasts: the page then asks again, with its key."""
_VERSION = "version"
"""Value of a row that a publish made."""
_MOST_VERSIONS = 200
"""Newest versions that are listed."""
_HASHES = 1000
"""Most versions whose hashes a sampler is asked for."""
Limit = Annotated[int, Query(ge=0, le=10_000)]
Names = Annotated[list[str], Query(default_factory=list)]


@dataclass(frozen=True, slots=True)
class PageApi:
    """The routes."""

    services: Services
    models: Models
    deployment: Deployment

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix=f"{PREFIX}/api", tags=["page"])

        @router.get("/me")
        async def me(request: Request) -> dict[str, str]:
            identity = identity_of(request)
            return {"tenant": identity.tenant, "key_name": identity.key_name}

        @router.get("/runs")
        async def runs(request: Request) -> Response:
            return _json({"runs": [_run(run) for run in await self._runs(tenant_of(request))]})

        @router.get("/runs/{run_id}/rows")
        async def rows(request: Request, run_id: str, name: Names, after: int = 0, points: Limit = 0) -> Response:
            asked = codec.make(
                metrics_pb.GetMetricsRequest, run_id=run_id, after=after, names=name, at_most_points=points
            )
            reply = await self.services.call(tenant_of(request), asked, metrics_pb.GetMetricsResponse)
            content = await decoded(reply.ByteSize(), _rows, reply.rows, reply.next_after)
            return Response(content, media_type="application/json")

        @router.get("/runs/{run_id}/watch")
        async def watch(request: Request, run_id: str, after: int = 0) -> Response:
            asked = codec.make(metrics_pb.WatchMetricsRequest, run_id=run_id, after=after, max_seconds=_WATCH_SECONDS)
            return StreamedResponse(self._watch(tenant_of(request), asked, request.url.path), media_type=EVENTS)

        @router.get("/runs/{run_id}/rollouts")
        async def rollouts(
            request: Request,
            run_id: str,
            step: int | None = None,
            after: int | None = None,
            before: int = 0,
            limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        ) -> Response:
            asked = codec.make(
                metrics_pb.GetRolloutsRequest, run_id=run_id, step=step, after=after, before=before, page_size=limit
            )
            reply = await self.services.call(tenant_of(request), asked, metrics_pb.GetRolloutsResponse)
            return _json({"rollouts": [_rollout(row) for row in reply.rollouts]})

        @router.get("/runs/{run_id}/versions")
        async def versions(request: Request, run_id: str) -> Response:
            return _json(await self._versions(tenant_of(request), run_id))

        @router.get("/status")
        async def status(request: Request) -> Response:
            return _json(await self._status(identity_of(request)))

        return router

    async def _runs(self, tenant: str) -> list[Run]:
        request = pb.ListRunsRequest(page_size=_MOST_RUNS)
        reply = await self.services.call(tenant, request, pb.ListRunsResponse)
        return [codec.run_from_proto(run) for run in reply.runs]

    async def _watch(self, tenant: str, request: metrics_pb.WatchMetricsRequest, path: str) -> AsyncGenerator[bytes]:
        """Yield rows as server-sent events; an error is the last event."""
        reply, seconds = metrics_pb.WatchMetricsResponse, _WATCH_SECONDS + 30
        try:
            async with self.services.stream(tenant, request, reply, seconds=seconds) as messages:
                yield b": rows follow\n\n"
                async for message in messages:
                    content = await decoded(message.ByteSize(), _rows, message.rows, 0)
                    yield b"data: " + content + b"\n\n"
        except errors.PacelineError as error:
            yield last_event(error, path)

    async def _versions(self, tenant: str, run_id: str) -> dict[str, Any]:
        """Return a run's published versions, newest first, and the samplers that hold each."""
        request = metrics_pb.GetMetricsRequest(run_id=run_id, names=[_VERSION], at_most_points=2000)
        published = await self.services.call(tenant, request, metrics_pb.GetMetricsResponse)
        found = {
            int(row.values[_VERSION]): {"step": row.step, "time": row.time.timestamp()}
            for row in map(metrics_row_from_proto, published.rows)
        }
        info = await self.services.call(tenant, pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        held = [one for one in held_from_proto(info, {}) if one.run_id == run_id]
        hashes = {one.model.version: one.model.blake3 for one in info.agreements if one.model.run_id == run_id}
        hashes |= await self._loaded(tenant, run_id)
        listed = sorted({*found, *hashes, *(one.version for one in held)} - {0}, reverse=True)[:_MOST_VERSIONS]
        return {
            "samplers": [one.sampler_id for one in info.watchers],
            "versions": [
                {"version": version, "blake3": hashes.get(version, ""), "held": _holders(held, version), **known}
                for version in listed
                for known in [found.get(version, {"step": None, "time": None})]
            ],
        }

    async def _loaded(self, tenant: str, run_id: str) -> dict[int, str]:
        """Return the hashes of the versions that a sampler has loaded; none while no sampler answers."""
        request, reply = (
            sampler_pb.ListVersionsRequest(run_id=run_id, page_size=_HASHES),
            sampler_pb.ListVersionsResponse,
        )
        try:
            answer = await self.services.call(tenant, request, reply, seconds=5)
        except (errors.Unavailable, errors.TimedOut, errors.Exhausted):
            return {}
        return {one.model.version: one.model.blake3 for one in answer.versions}

    async def _status(self, identity: Identity) -> Status:
        """Return what `paceline status` shows."""
        tenant, failure = identity.tenant, ""
        told, account = await asyncio.gather(self.deployment.capabilities(tenant), self.deployment.account(identity))
        watching, held, queue, disk = list[str](), list[Held](), list[Waiting](), None
        try:
            runs = await self._runs(tenant)
            names = {run.run_id: run.user_metadata.get(NAME, "") for run in runs}
            info = await self.services.call(tenant, pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
            watching, held = [one.sampler_id for one in info.watchers], held_from_proto(info, names)
            queue = [
                one for run in runs if run.last_seq_id > run.executed_seq_id for one in await self._waiting(tenant, run)
            ]
            disk = await self._disk(tenant)
        except (errors.Unavailable, errors.TimedOut) as error:
            failure = str(error)
        return Status(
            "",
            tenant,
            list(map(service_from_proto, told.services)),
            list(map(model_from_proto, told.models)),
            watching,
            held,
            queue,
            disk,
            list(map(codec.quota_from_proto, account.quotas)),
            failure,
        )

    async def _waiting(self, tenant: str, run: Run) -> list[Waiting]:
        request = pb.FollowRequest(run_id=run.run_id, max_seconds=0)
        async with self.services.stream(tenant, request, pb.FollowResponse, seconds=10) as messages:
            return waiting_from_proto(run, [message.status async for message in messages])

    async def _disk(self, tenant: str) -> Disk:
        return disk_from_proto(await self.services.call(tenant, pb.GetUsageRequest(), pb.GetUsageResponse))


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _number(value: float) -> float | str:
    """Return a value as JSON can have it: NaN and infinity as JavaScript's names for them, as in metrics.jsonl."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _run(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.user_metadata.get(NAME, ""),
        "base_model": run.base_model,
        "step": run.step,
        "latest_version": run.latest_version,
        "state": run.state.name.lower(),
        "waiting": run.last_seq_id - run.executed_seq_id,
        "volume_bytes": run.volume_bytes,
        "created": run.create_time.timestamp(),
        "last_use": run.last_use_time.timestamp() if run.last_use_time else None,
        "parameters": run.trainable_parameters,
        "damage": run.damage,
    }


def _rows(rows: Iterable[metrics_pb.MetricsRow], next_after: int) -> bytes:
    listed = [
        {
            "number": row.number,
            "step": row.step,
            "time": row.time.seconds + row.time.nanos / 1e9,
            "source": metrics_pb.RowSource.Name(row.source).removeprefix("ROW_SOURCE_").lower(),
            "values": {name: _number(value) for name, value in row.values.items()},
        }
        for row in rows
    ]
    return msgspec.json.encode({"rows": listed, "next_after": next_after})


def _rollout(message: metrics_pb.RolloutRow) -> dict[str, Any]:
    row = rollout_row_from_proto(message)
    logged = row.rollout
    return {
        "number": row.number,
        "step": row.step,
        "time": row.time.timestamp(),
        "prompt": logged.prompt,
        "completion": logged.completion,
        "reward": None if logged.reward is None else _number(logged.reward),
        "extras": logged.extras,
    }


def _holders(held: Iterable[Held], version: int) -> list[dict[str, Any]]:
    return [{"sampler": one.sampler_id, "acknowledged": one.acknowledged} for one in held if one.version == version]
