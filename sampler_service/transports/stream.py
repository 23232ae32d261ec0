"""The bridges stream, collective and shared: the trainer sends versions in chunks.

If the trainer is unreachable, they are read from the volume.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from paceline import errors
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights import Piece
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import ManifestRules, StagedAdapter, VersionKey, arriving_within, check_is
from sampler_service.transports.collective import GroupReceiver
from sampler_service.transports.staging import NotLinked, StagingArea
from sampler_service.transports.trainer_link import TrainerLink
from sampler_service.transports.volume import VolumeBridge

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Offer:
    """A version's file, and its manifest once the trainer has announced it."""

    key: VersionKey
    draft: pb.Manifest
    """The manifest without checksums."""
    path: Path
    seconds: float
    """How long the announcement may take."""
    announced: asyncio.Future[pb.Manifest] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_dropped: bool = False
    """Whether the trainer disconnected, offered another version of the run, or deleted the run."""

    async def sealed(self) -> pb.Manifest:
        """Wait for the announced manifest. Raises TrainerUnavailable on timeout, ChecksumMismatch if it differs."""
        async with arriving_within(self.seconds):
            manifest = await asyncio.shield(self.announced)
        without_checksums = pb.Manifest()
        without_checksums.CopyFrom(manifest)
        without_checksums.model.ClearField("blake3")
        without_checksums.ClearField("crc32c")
        if without_checksums != self.draft:
            raise errors.ChecksumMismatch("the announced manifest differs from the offered one")
        return manifest


class Offers:
    """The newest offer of each run."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the timeout of an announcement after its offer."""
        self._seconds = seconds
        self._offers: dict[str, Offer] = {}

    def expect(self, staged: pb.Staged) -> Offer:
        """Register an offer, replacing the run's previous one."""
        model = staged.manifest.model
        self.drop(model.run_id)
        key = VersionKey(model.run_id, model.version)
        offer = self._offers[model.run_id] = Offer(key, staged.manifest, Path(staged.staged_path), self._seconds)
        return offer

    def find(self, key: VersionKey) -> Offer | None:
        """Return the offer of a version, if any."""
        offer = self._offers.get(key.run_id)
        return offer if offer is not None and offer.key == key else None

    def announced(self, key: VersionKey, manifest: pb.Manifest) -> None:
        """Pass a version's manifest to the waiters of its offer."""
        offer = self.find(key)
        if offer is not None and not offer.announced.done():
            offer.announced.set_result(manifest)

    def drop(self, run_id: str) -> None:
        """Drop a run's offer and fail its waiters."""
        offer = self._offers.pop(run_id, None)
        if offer is None:
            return
        offer.is_dropped = True
        if not offer.announced.done():
            offer.announced.set_exception(errors.TrainerUnavailable("the version was not announced; try again"))
            offer.announced.exception()  # mark it as retrieved: there may be no waiters

    def clear(self) -> None:
        """Drop all offers: the trainer that made them disconnected."""
        for run_id in list(self._offers):
            self.drop(run_id)


class StreamBridge:
    """Receives adapters into the staging directory, verifying each chunk and then the whole.

    If this sampler sees the trainer's staging directory, it links versions from there and verifies them as a whole.
    """

    needs_volume = False

    def __init__(
        self,
        trainer: TrainerLink,
        staging: StagingArea,
        rules: ManifestRules,
        volume: VolumeBridge,
        offers: Offers,
        group: GroupReceiver | None,
    ) -> None:
        """`offers` holds the trainer's offers of versions that it has staged but not announced.

        With the bridge `collective`, `group` delivers most versions; the others, such as those announced before this
        sampler joined, are streamed.
        """
        self._trainer = trainer
        self._staging = staging
        self._rules = rules
        self._volume = volume
        self._offers = offers
        self._group = group
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
        if self._group is not None and (staged := await self._group.receive(ref, tenant)) is not None:
            return staged
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
                        return await receiver.adopt(Path(part.staged_path))
                    else:
                        raise errors.ChecksumMismatch("the trainer's response has neither a chunk nor a path")
                    del part  # free its MiB before the next one arrives
                return await receiver.finish()
