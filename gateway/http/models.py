"""Resolve the names that HTTP clients use for weights."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.http.run_names import NamedRun, RunNames
from gateway.http.services import Services
from gateway.http.tinker.names import TINKER, Aliases, Names
from paceline import codec, errors
from paceline.layout import SCHEME, CheckpointPath
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind, ModelRef, Run
from paceline.types.v1 import model_pb2

NEWEST = "newest"
_OWNER = "paceline"
_PAGE = 1000
_INFO_SECONDS = 5.0
Page = TypeVar("Page", pb.ListRunsResponse, pb.ListCheckpointsResponse)
_VERSION = re.compile(r"[1-9][0-9]{0,14}")


Entry = Mapping[str, Any]
"""A model as OpenAI's API describes it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Models that can be sampled from."""

    entries: Sequence[Entry]
    lacks: str
    """What is left out, and why; empty if the list is complete."""

    def body(self) -> dict[str, Any]:
        """Return the list as OpenAI's API has it; a list that is not complete says so."""
        return {"object": "list", "data": self.entries} | ({"incomplete": self.lacks} if self.lacks else {})


class Models:
    """Resolves names to weights, and lists a tenant's runs and checkpoints."""

    def __init__(self, services: Services, names: Names, aliases: Aliases) -> None:
        self._services = services
        self._names = names
        self._aliases = aliases
        self._run_names = RunNames(services)

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
            if not named.latest_version and not version and named.is_online:
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

    async def _named(self, tenant: str, name: str) -> NamedRun | None:
        """Return the newest run with a name, preferring runs that have published; None if there is none."""
        if name in {"", await self._served(tenant), *self._aliases.names}:
            return None
        return await self._run_names.find(tenant, name)

    async def listing(self, tenant: str) -> Listing:
        """Return what can be sampled from: the base model, runs with a version, sampler checkpoints.

        While the trainer is away these are the base model and the runs that are known; the list says that it lacks the
        others.
        """
        info = (await self.describe_sampler(tenant)).model
        base = [entry_of(name) for name in self.base_names(info)]
        lacks, checkpoints = "", list[Entry]()
        try:
            if not self._services.router.trainer.ready:
                raise errors.UpstreamUnavailable("the trainer cannot be reached")
            runs = [NamedRun.of(run) for run in await self.runs(tenant)]
            checkpoints = [
                _checkpoint_entry(checkpoint)
                for checkpoint in await self.checkpoints(tenant)
                if checkpoint.kind is CheckpointKind.SAMPLER
            ]
        except (errors.Unavailable, errors.TimedOut) as error:
            runs = [*self._run_names.known(tenant)]
            lacks = f"checkpoints and runs that were not used lately are left out: {error.message}"
        published = [run for run in runs if run.latest_version]
        named = {run.name: run for run in reversed(published) if run.name}
        pairs = [*((run.run_id, run) for run in published), *named.items()]
        return Listing([*base, *(_run_entry(name, run) for name, run in pairs), *checkpoints], lacks)

    async def entry(self, tenant: str, name: str) -> Entry:
        """Return the entry of any name that can be sampled from.

        Raises ModelNotFound, RunNotFound, InvalidPath, and UpstreamUnavailable if only the trainer, which is away,
        could tell.
        """
        ref = await self.resolve(tenant, name)
        if ref.checkpoint:
            run_id = CheckpointPath.parse(ref.checkpoint).run_id
            found = [one for one in await self.checkpoints(tenant, run_id) if one.path == ref.checkpoint]
            if not found:
                raise errors.ModelNotFound(
                    f"no such checkpoint: {name[:200]}; GET /v1/models lists what there is", field="model"
                )
            return {**_checkpoint_entry(found[0]), "id": name}
        if not ref.run_id:
            return entry_of(name)
        known = [run for run in self._run_names.known(tenant) if run.run_id == ref.run_id]
        if not known or self._services.router.trainer.ready:
            known = [NamedRun.of(await self.run(tenant, ref.run_id))]
        if not known[0].latest_version:
            raise errors.ModelNotFound(f"has no version yet: {name[:100]}; publish its weights", field="model")
        return _run_entry(name, known[0])

    async def describe_sampler(self, tenant: str) -> sampler_pb.GetServerInfoResponse:
        """Return a sampler's description of itself."""
        return await self._services.call(tenant, sampler_pb.GetServerInfoRequest(), sampler_pb.GetServerInfoResponse)

    async def unserved_head(self, tenant: str) -> str:
        """Return the name of the output head if no watching sampler serves an adapter on it.

        Empty if one does, or if that is not known, because no sampler watches or the trainer is away.
        """
        if not self._services.router.trainer.ready:
            return ""
        request, reply = pb.GetServerInfoRequest(), pb.GetServerInfoResponse
        try:
            info = await self._services.call(tenant, request, reply, seconds=_INFO_SECONDS)
        except (errors.Unavailable, errors.TimedOut, errors.Exhausted):
            return ""
        groups = (group for model in info.models for group in model.certificate.groups)
        heads = {name for group in groups if group.name == "train_unembed" for name in group.modules}
        return next((name for name in info.unserved_modules if name.rpartition(".")[2] in heads), "")

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


def entry_of(name: str, created: float = 0, **more: object) -> Entry:
    """Return the entry of a name; `created` is in seconds since the epoch, 0 if that is not known."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": _OWNER, **more}


def _run_entry(name: str, run: NamedRun) -> Entry:
    return entry_of(name, run.created, latest_version=run.latest_version)


def _checkpoint_entry(checkpoint: Checkpoint) -> Entry:
    return entry_of(
        checkpoint.path, checkpoint.create_time.timestamp(), sha256=checkpoint.sha256, blake3=checkpoint.blake3
    )
