"""Receives pushed versions: a manifest, then chunks in order of offset, then a commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from paceline import errors
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE, check_run_id
from paceline.rpc.identity import PEER_TENANT, Identity
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import ModelRef
from paceline.weights import Piece, read_adapter_config, read_tensor_entries
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from sampler_service.transports.base import ManifestRules, StagedAdapter, foreign
from sampler_service.transports.staging import StagingArea
from sampler_service.transports.trainer_link import TrainerLink

Parts = AsyncIterator[pb.UpdateWeightsRequest]


class PushReceiver:
    """Accepts pushed versions from services, and from tenants for their own runs."""

    def __init__(self, staging: StagingArea, rules: ManifestRules, trainer: TrainerLink) -> None:
        self._staging = staging
        self._rules = rules
        self._trainer = trainer

    async def receive(self, manifest: weights_pb.Manifest, parts: Parts, identity: Identity) -> StagedAdapter:
        """Return the pushed adapter, verified but not yet loaded; `parts` are those after the manifest.

        Raises MissingField if a part is missing, RunNotFound for another tenant's run, ChecksumMismatch, InvalidShape,
        RankTooLarge, ModelNotFound.
        """
        await self._check_owner(manifest, identity)
        self._rules.check(manifest)
        async with self._staging.receive(manifest) as receiver:
            async for part in parts:
                match part.WhichOneof("part"):
                    case "chunk":
                        await receiver.write(Piece.of(part.chunk))
                    case "commit":
                        return await _finish(await receiver.finish(), part.commit.blake3)
                    case _:
                        raise errors.InvalidArgument("must be a chunk or the commit after the manifest", field="part")
        raise errors.MissingField("is missing; end the stream with it", field="commit")

    async def _check_owner(self, manifest: weights_pb.Manifest, identity: Identity) -> None:
        """Check that the caller may push: a service for any tenant, a tenant only for its own runs.

        The trainer says who owns a run. Raises RunNotFound, and as `_check_same`.
        """
        if identity.is_peer:
            await self._check_same(manifest)
            return
        ref = ModelRef(run_id=manifest.model.run_id)
        if manifest.tenant != identity.tenant:
            raise foreign(ref)
        try:
            owned = await self._trainer.describe(ref, identity.tenant)
        except errors.VersionNotFound:  # the run is the tenant's and has no version yet
            return
        if owned.tenant != identity.tenant:
            raise foreign(ref)
        await self._check_same(manifest)

    async def _check_same(self, manifest: weights_pb.Manifest) -> None:
        """Refuse content other than the trainer has under this number. If the trainer is unreachable, accept any.

        Raises VersionExists.
        """
        model = manifest.model
        try:
            known = await self._trainer.describe(ModelRef(run_id=model.run_id, version=model.version), PEER_TENANT)
        except (errors.NotFound, errors.TrainerUnavailable):
            return
        if known.model.blake3 != model.blake3:
            message = f"the trainer has {known.model.blake3} under this number; push another number"
            raise errors.VersionExists(message, field="manifest.model.version")


async def read_pushed_manifest(parts: Parts) -> weights_pb.Manifest:
    """Read the manifest, with which a push begins. Raises MissingField, RunNotFound."""
    first = await anext(parts, None)
    if first is None or first.WhichOneof("part") != "manifest":
        raise errors.MissingField("must come first", field="manifest")
    model = first.manifest.model
    check_run_id(model.run_id, "manifest.model.run_id")
    if not model.version or model.checkpoint:
        raise errors.MissingField("is not set; only versions are pushed", field="manifest.model.version")
    return first.manifest


async def _finish(staged: StagedAdapter, committed: str) -> StagedAdapter:
    try:
        if committed != staged.served.blake3:
            raise errors.ChecksumMismatch("does not match the received bytes", field="commit.blake3")
        await asyncio.to_thread(_check_content, staged)
    except FileNotFoundError as error:
        await staged.discard()
        raise errors.EngineUnavailable("the pushed files were removed while they were read; push again") from error
    except BaseException:
        await staged.discard()
        raise
    return staged


def _check_content(staged: StagedAdapter) -> None:
    """Compare the file with its manifest, which is not trusted because it comes from a client. Raises InvalidShape."""
    if list(staged.manifest.tensors) != read_tensor_entries(staged.directory / WEIGHTS_FILE):
        raise errors.InvalidShape("are not the tensors of the received file", field="manifest.tensors")
    rank = read_adapter_config(staged.directory / CONFIG_FILE).rank
    if rank != staged.manifest.rank:
        raise errors.InvalidShape(f"differs from the rank in adapter_config, {rank}", field="manifest.rank")
