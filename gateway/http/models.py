"""Resolve the names that HTTP clients use for weights."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TypeVar

from gateway.http.services import Services
from gateway.http.tinker.names import TINKER, Aliases, Names
from paceline import codec, errors
from paceline.layout import SCHEME
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind, ModelRef, Run
from paceline.types.v1 import model_pb2

NEWEST = "newest"
NAME = "name"
"""Metadata key of a run's name, by which clients may call it."""
ONLINE = {"api": "online"}
"""Metadata of runs that start from the base model's weights and publish them first."""
_PAGE = 1000
Page = TypeVar("Page", pb.ListRunsResponse, pb.ListCheckpointsResponse)
_VERSION = re.compile(r"[1-9][0-9]{0,14}")


class Models:
    """Resolves names to weights, and lists a tenant's runs and checkpoints."""

    def __init__(self, services: Services, names: Names, aliases: Aliases) -> None:
        self._services = services
        self._names = names
        self._aliases = aliases

    async def resolve(self, tenant: str, name: str, field: str = "model") -> ModelRef:
        """Return the weights that a name refers to.

        A name is one of:

        - the base model's name or an alias of it;
        - a run's id, its metadata's `name`, or its model id in Tinker's API: the run's newest version, or the version
          given by a suffix @newest or @<number>;
        - a sampler checkpoint's path.

        An online model resolves to the base model until its first version exists.

        Raises RunNotFound, ModelNotFound, InvalidPath, InvalidArgument.
        """
        if name.startswith((SCHEME, TINKER)):
            path = self._names.checkpoint(tenant, name, field)
            if path.kind is not CheckpointKind.SAMPLER:
                raise errors.InvalidPath("is training state; name a sampler checkpoint", field=field)
            return ModelRef(checkpoint=str(path))
        run, at, version = name.partition("@")
        # A run id, or a model id of Tinker's API.
        run_id = self._names.run_of(tenant, run) if run.startswith("run-") or ":train:" in run else ""
        if not run_id and (named := await self._named(tenant, run)):
            if not named.latest_version and not version and ONLINE.items() <= named.user_metadata.items():
                return ModelRef(base=await self._served(tenant))  # Its first version will compute the same.
            run_id = named.run_id
        if not run_id:
            return ModelRef(base=await self.served(tenant, name, field))
        if not at or version == NEWEST:
            return ModelRef(run_id=run_id)
        if not _VERSION.fullmatch(version):
            raise errors.InvalidArgument(
                f"has version {version[:20]!r}; it is a number from 1, or {NEWEST}", field=field
            )
        return ModelRef(run_id=run_id, version=int(version))

    async def served(self, tenant: str, name: str, field: str = "base_model") -> str:
        """Return the base model's own name for any of its names, even with a leading path. Raises ModelNotFound."""
        served = await self._served(tenant)
        if name in {"", served, *self._aliases.names} or name.rstrip("/").rpartition("/")[2] == served:
            return served
        raise errors.ModelNotFound(f"no such model: {name[:100]}; {served} is served", field=field)

    async def _served(self, tenant: str) -> str:
        base = self._services.router.base
        return base.name if base else (await self.describe_sampler(tenant)).model.name

    async def _named(self, tenant: str, name: str) -> Run | None:
        """Return the newest run with a name, preferring runs that have published; None if there is none."""
        if name in {"", await self._served(tenant), *self._aliases.names}:
            return None
        named = [run for run in await self.runs(tenant) if run.user_metadata.get(NAME) == name]
        published = [run for run in named if run.latest_version]
        return next(iter((*published, *named)), None)

    async def describe_sampler(self, tenant: str) -> sampler_pb.GetServerInfoResponse:
        """Return a sampler's description of itself."""
        return await self._services.call(tenant, sampler_pb.GetServerInfoRequest(), sampler_pb.GetServerInfoResponse)

    def base_names(self, info: model_pb2.ModelInfo) -> tuple[str, ...]:
        """Return the names of the base model."""
        return (info.name, *self._aliases.names)

    async def run(self, tenant: str, run_id: str) -> Run:
        """Return a run. Raises RunNotFound."""
        return codec.run_from_proto(
            (await self._services.call(tenant, pb.GetRunRequest(run_id=run_id), pb.GetRunResponse)).run
        )

    async def runs(self, tenant: str) -> list[Run]:
        """Return the tenant's runs, newest first."""
        pages = self._pages(tenant, pb.ListRunsRequest(page_size=_PAGE), pb.ListRunsResponse)
        return [codec.run_from_proto(run) async for page in pages for run in page.runs]

    async def checkpoints(self, tenant: str, run_id: str = "") -> list[Checkpoint]:
        """Return the tenant's checkpoints, newest first, of one run or of all."""
        request = pb.ListCheckpointsRequest(run_id=run_id, page_size=_PAGE)
        pages = self._pages(tenant, request, pb.ListCheckpointsResponse)
        return [codec.checkpoint_from_proto(found) async for page in pages for found in page.checkpoints]

    async def _pages(
        self, tenant: str, request: pb.ListRunsRequest | pb.ListCheckpointsRequest, reply: type[Page]
    ) -> AsyncIterator[Page]:
        while True:
            page = await self._services.call(tenant, request, reply)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
