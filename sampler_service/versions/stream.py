"""The stream bridge: the trainer sends versions in chunks; the volume is the way out when it cannot be reached."""

from __future__ import annotations

from paceline import errors
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.versions.bridges import ManifestRules, StagedAdapter, check_is
from sampler_service.versions.staging import StagingArea
from sampler_service.versions.trainer_link import TrainerLink
from sampler_service.versions.volume import VolumeBridge

_log = get_logger(__name__)


class StreamBridge:
    """Receives adapters into the staging area, verifying each chunk and then the whole."""

    name = "stream"
    needs_volume = False

    def __init__(self, trainer: TrainerLink, staging: StagingArea, rules: ManifestRules, volume: VolumeBridge) -> None:
        self._trainer = trainer
        self._staging = staging
        self._rules = rules
        self._volume = volume

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
            return await self._receive(ref, tenant)
        except errors.TrainerUnavailable:
            if not self._volume.holds(ref):
                raise
        _log.warning("trainer cannot be reached; reading the volume", weights=str(ref))
        return await self._volume.fetch(ref, tenant)

    async def _receive(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        async with self._trainer.fetch(ref, tenant) as (manifest, chunks):
            check_is(manifest, ref, tenant)
            self._rules.check(manifest)
            async with self._staging.receive(manifest) as reception:
                async for chunk in chunks:
                    await reception.write(chunk)
                return await reception.finish()
