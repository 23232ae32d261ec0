"""The stream bridge: the trainer sends versions in chunks; the volume is the way out when it cannot be reached."""

from __future__ import annotations

from pathlib import Path

from paceline import errors
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.versions.bridges import ManifestRules, StagedAdapter, check_is
from sampler_service.versions.staging import NotLinked, StagingArea
from sampler_service.versions.trainer_link import TrainerLink
from sampler_service.versions.volume import VolumeBridge

_log = get_logger(__name__)


class StreamBridge:
    """Receives adapters into the staging area, verifying each chunk and then the whole.

    Versions in the trainer's staging directory are linked instead, where this sampler sees it, and verified as a whole.
    """

    name = "stream"
    needs_volume = False

    def __init__(self, trainer: TrainerLink, staging: StagingArea, rules: ManifestRules, volume: VolumeBridge) -> None:
        self._trainer = trainer
        self._staging = staging
        self._rules = rules
        self._volume = volume
        self._shares_memory = True
        """Until it turns out that the trainer's staged files cannot be linked from here."""

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        try:
            manifest = await self._trainer.describe(ref, tenant)
        except errors.TrainerUnavailable:
            if not self._volume.holds(ref):
                raise
            return await self._volume.describe(ref, tenant)
        check_is(manifest, ref, tenant)
        return manifest

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        try:
            return await self._link_or_receive(ref, tenant)
        except errors.TrainerUnavailable:
            if not self._volume.holds(ref):
                raise
        _log.warning("trainer cannot be reached; reading the volume", weights=str(ref))
        return await self._volume.fetch(ref, tenant)

    async def _link_or_receive(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        if self._shares_memory:
            try:
                return await self._receive(ref, tenant, accept_staged_path=True)
            except NotLinked as error:
                self._shares_memory = error.is_shared
                _log.info("version not linked; it is streamed", weights=str(ref), error=str(error.__cause__))
        return await self._receive(ref, tenant, accept_staged_path=False)

    async def _receive(self, ref: ModelRef, tenant: str, *, accept_staged_path: bool) -> StagedAdapter:
        async with self._trainer.fetch(ref, tenant, accept_staged_path=accept_staged_path) as (manifest, parts):
            check_is(manifest, ref, tenant)
            self._rules.check(manifest)
            async with self._staging.receive(manifest) as reception:
                async for part in parts:
                    if part.WhichOneof("part") == "staged_path":
                        return await reception.adopt(Path(part.staged_path))
                    await reception.write(part.chunk)
                return await reception.finish()
