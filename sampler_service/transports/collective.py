"""Receives versions that the trainer broadcasts over a process group (bridge `collective`)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

from paceline import errors
from paceline.background import Background
from paceline.collective import GroupMember, GroupMembership
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.metrics import SamplerMetrics
from sampler_service.transports.base import ManifestRules, StagedAdapter, VersionKey, check_is
from sampler_service.transports.staging import StagingArea

_log = get_logger(__name__)

Report = Callable[[pb.WatchVersionsRequest], None]
Arrival = asyncio.Task[StagedAdapter]


class GroupReceiver:
    """This sampler's member of the trainer's process group. It takes part in every announced broadcast."""

    def __init__(self, staging: StagingArea, rules: ManifestRules, metrics: SamplerMetrics) -> None:
        """`rules` decide which broadcast files are kept; others are received and discarded."""
        self._staging = staging
        self._rules = rules
        self._metrics = metrics
        self._member: GroupMember | None = None
        self._generation = 0
        """The generation to be a member of; 0 for none."""
        self._arrivals: dict[VersionKey, Arrival] = {}
        self._background = Background("process group's work failed")
        self._report: Report

    def join(self, group: pb.Group, report: Report) -> None:
        """Join a new generation in the background; `report` notifies the trainer if the group is lost."""
        self.leave()
        self._generation, self._report = group.generation, report
        self._background.spawn(self._join(group))

    def expect(self, key: VersionKey, announcement: pb.Announcement) -> None:
        """Start to receive an announced version, if it is broadcast over this sampler's generation."""
        member = self._member
        if member is not None and member.generation == announcement.broadcast_generation:
            self.drop(key)
            self._arrivals[key] = asyncio.create_task(self._transfer(member, announcement.manifest))

    async def receive(self, ref: ModelRef, tenant: str) -> StagedAdapter | None:
        """Return a version that the group delivers; None if it does not, or if what it delivered is damaged.

        Raises as `check_is`.
        """
        arrival = self._arrivals.pop(VersionKey(ref.run_id, ref.version or 0), None)
        if arrival is None:
            return None
        try:
            staged = await arrival
        except (errors.PeerLost, errors.ChecksumMismatch) as error:
            _log.warning("version not received over the group; fetching it", weights=str(ref), reason=error.reason)
            return None
        try:
            check_is(staged.manifest, ref, tenant)
        except errors.PacelineError:
            await staged.discard()
            raise
        return staged

    def drop(self, key: VersionKey) -> None:
        """Discard a version that nothing received."""
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            self._background.spawn(_discard(arrival))

    def forget_run(self, run_id: str) -> None:
        """Discard what arrives of a deleted run."""
        for key in [key for key in self._arrivals if key.run_id == run_id]:
            self.drop(key)

    def leave(self) -> None:
        """Leave the group: the trainer disconnected or is making another generation."""
        member, self._member, self._generation = self._member, None, 0
        for key in list(self._arrivals):
            self.drop(key)
        if member is not None:
            self._background.spawn(member.stop())

    async def close(self) -> None:
        """Leave the group and wait for background work."""
        self.leave()
        await self._background.finish()

    async def _join(self, group: pb.Group) -> None:
        member = await GroupMember.start(
            GroupMembership(group.backend, group.address, group.generation, group.rank, group.size, group.seconds)
        )
        # While the process started, this sampler may have left the group or been called to another generation.
        if self._generation != group.generation:
            await member.stop()
            return
        self._member = member
        try:
            await member.join()
        except errors.PeerLost as error:
            self._lost(member, error)
        else:
            _log.info("group joined", generation=group.generation, rank=group.rank, size=group.size)

    async def _transfer(self, member: GroupMember, manifest: pb.Manifest) -> StagedAdapter:
        refusal: errors.PacelineError | None = None
        try:
            self._rules.check(manifest)
            file = await asyncio.to_thread(self._staging.allocate, manifest)
        except errors.PacelineError as error:
            refusal = error
        try:
            # Take part even if the version is refused: a missing member would break the broadcast for all others.
            await member.transfer(None if refusal else file, manifest.total_size)
            if refusal:
                raise refusal
            staged = StagedAdapter(manifest, file.parent, temporary=True)
            await staged.verify_again()
        except BaseException as error:
            if refusal is None:
                await asyncio.to_thread(shutil.rmtree, file.parent)
            if isinstance(error, errors.PeerLost):
                self._lost(member, error)
            raise
        return staged

    def _lost(self, member: GroupMember, error: errors.PeerLost) -> None:
        """Report to the trainer, once per generation, that the group is lost."""
        if self._member is not member:
            return
        _log.warning("process group lost", generation=member.generation, reason=error.reason, error=str(error))
        self._metrics.group_losses.inc()
        self._member = None
        self._background.spawn(member.stop())
        self._report(
            pb.WatchVersionsRequest(left_group=pb.LeftGroup(generation=member.generation, reason=error.reason))
        )


async def _discard(arrival: Arrival) -> None:
    """Wait for an unwanted transfer to end and remove its files; its errors are ignored."""
    (staged,) = await asyncio.gather(arrival, return_exceptions=True)
    if isinstance(staged, StagedAdapter):
        await staged.discard()
