"""Names that HTTP clients have for weights."""

from __future__ import annotations

import re

from gateway.http.services import Services
from gateway.http.tinker.names import TINKER, Aliases, Names
from paceline import codec, errors
from paceline.layout import SCHEME
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind, ModelRef, Run
from paceline.types.v1 import model_pb2

NEWEST = "newest"
_PAGE = 1000
_VERSION = re.compile(r"[1-9][0-9]{0,14}")


class Models:
    """Knows what a name stands for."""

    def __init__(self, services: Services, names: Names, aliases: Aliases) -> None:
        self._services = services
        self._names = names
        self._aliases = aliases

    def resolve(self, tenant: str, name: str, field: str = "model") -> ModelRef:
        """Return the weights that a name stands for.

        The base model by its name or an alias; a run (or a model of Tinker's API) for its newest version, with @newest
        or @<number> behind it too; a sampler checkpoint by its path. Raises RunNotFound, InvalidPath, InvalidArgument.
        """
        if name.startswith((SCHEME, TINKER)):
            path = self._names.checkpoint(tenant, name, field)
            if path.kind is not CheckpointKind.SAMPLER:
                raise errors.InvalidPath("is training state; name a sampler checkpoint", field=field)
            return ModelRef(checkpoint=str(path))
        run, _, version = name.partition("@")
        if run.startswith("run-") or ":train:" in run:
            run_id = self._names.run_of(tenant, run)
            if version in {"", NEWEST}:
                return ModelRef(run_id=run_id)
            if not _VERSION.fullmatch(version):
                raise errors.InvalidArgument(f"has version {version[:20]!r}; it is a number or {NEWEST}", field=field)
            return ModelRef(run_id=run_id, version=int(version))
        return ModelRef(base=self._aliases.served(name))

    async def describe(self, tenant: str) -> model_pb2.ModelInfo:
        """Describe the base model, as samplers have it."""
        info = await self._services.call(tenant, sampler_pb.GetServerInfoRequest(), sampler_pb.GetServerInfoResponse)
        return info.model

    def base_names(self, info: model_pb2.ModelInfo) -> tuple[str, ...]:
        """Return the names of the base model."""
        return (info.name, *self._aliases.names)

    async def runs(self, tenant: str) -> list[Run]:
        """Return the tenant's runs, newest first."""
        runs: list[Run] = []
        request = pb.ListRunsRequest(page_size=_PAGE)
        while True:
            reply = await self._services.call(tenant, request, pb.ListRunsResponse)
            runs += map(codec.run_from_proto, reply.runs)
            if not reply.next_page_token:
                return runs
            request = pb.ListRunsRequest(page_size=_PAGE, page_token=reply.next_page_token)

    async def checkpoints(self, tenant: str, run_id: str = "") -> list[Checkpoint]:
        """Return the tenant's checkpoints, newest first, of one run or of all."""
        found: list[Checkpoint] = []
        request = pb.ListCheckpointsRequest(run_id=run_id, page_size=_PAGE)
        while True:
            reply = await self._services.call(tenant, request, pb.ListCheckpointsResponse)
            found += map(codec.checkpoint_from_proto, reply.checkpoints)
            if not reply.next_page_token:
                return found
            request = pb.ListCheckpointsRequest(run_id=run_id, page_size=_PAGE, page_token=reply.next_page_token)
