"""The stream bridge: the trainer sends versions in chunks; if it is unreachable, they are read from the volume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from paceline import errors
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights import Piece
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import ManifestRules, StagedAdapter, check_is
from sampler_service.transports.prefetch import Offer, Offers
from sampler_service.transports.staging import NotLinked, StagingArea
from sampler_service.transports.trainer_link import TrainerLink
from sampler_service.transports.version_keys import VersionKey
from sampler_service.transports.volume import VolumeBridge

_log = get_logger(__name__)


class StreamBridge:
    """Receives adapters into the staging directory, verifying each chunk and then the whole.

    If this sampler sees the trainer's staging directory, it links versions from there and verifies them as a whole.
    """

    name = "stream"
    needs_volume = False

    def __init__(
        self, trainer: TrainerLink, staging: StagingArea, rules: ManifestRules, volume: VolumeBridge, offers: Offers
    ) -> None:
        """`offers` holds the trainer's offers of versions that it has staged but not announced."""
        self._trainer = trainer
        self._staging = staging
        self._rules = rules
        self._volume = volume
        self._offers = offers
        self._shares_memory = True
        """True until linking one of the trainer's staged files shows that it is not possible."""

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
        offer = self._offers.find(VersionKey(ref.run_id, ref.version or 0))
        if self._shares_memory:
            try:
                if offer is not None:
                    return await self._adopt(offer, ref, tenant)
                return await self._receive(ref, tenant, accept_staged_path=True)
            except NotLinked as error:
                self._shares_memory = error.is_shared
                _log.info("version not linked; it is streamed", weights=str(ref), error=str(error.__cause__))
        if offer is not None:
            await offer.sealed()  # until it is announced, the trainer answers that the version does not exist
        return await self._receive(ref, tenant, accept_staged_path=False)

    async def _adopt(self, offer: Offer, ref: ModelRef, tenant: str) -> StagedAdapter:
        check_is(offer.draft, ref, tenant)
        self._rules.check(offer.draft)
        async with self._staging.receive(offer.draft) as receiver:
            return await receiver.adopt(offer.path, offer.sealed)

    async def _receive(self, ref: ModelRef, tenant: str, *, accept_staged_path: bool) -> StagedAdapter:
        async with self._trainer.fetch(ref, tenant, accept_staged_path=accept_staged_path) as (manifest, parts):
            check_is(manifest, ref, tenant)
            self._rules.check(manifest)
            async with self._staging.receive(manifest) as receiver:
                async for part in parts:
                    if isinstance(part, Piece):
                        await receiver.write(part)
                    elif part.staged_path:
                        return await receiver.adopt(Path(part.staged_path), partial(_known, manifest))
                    else:
                        raise errors.ChecksumMismatch("the trainer's answer has neither a chunk nor a path in it")
                    del part  # free its MiB before the next one arrives
                return await receiver.finish()


async def _known(manifest: pb.Manifest) -> pb.Manifest:
    return manifest
