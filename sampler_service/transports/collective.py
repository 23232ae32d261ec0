"""The collective bridge: receives versions over a process group, and falls back to the stream bridge."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

from paceline import errors
from paceline.background import Background
from paceline.collective import GroupMember, GroupMembership
from paceline.log import get_logger
from paceline.types import ModelRef
from paceline.weights import served_model, weights_file
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.metrics import SamplerMetrics
from sampler_service.transports.base import ManifestRules, StagedAdapter, check_is
from sampler_service.transports.staging import StagingArea
from sampler_service.transports.stream import StreamBridge
from sampler_service.transports.version_keys import VersionKey

_log = get_logger(__name__)

Say = Callable[[pb.WatchVersionsRequest], None]
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

    def join(self, group: pb.Group, say: Say) -> None:
        """Join a new generation in the background; `say` notifies the trainer if that fails."""
        self.leave()
        self._generation = group.generation
        self._background.spawn(self._join(group, say))

    def expect(self, announcement: pb.Announcement, say: Say) -> None:
        """Receive an announced version, if it is broadcast over this sampler's generation."""
        member, manifest = self._member, announcement.manifest
        if member is not None and member.generation == announcement.broadcast_generation:
            key = VersionKey.of(served_model(manifest))
            self.drop(key)
            self._arrivals[key] = asyncio.create_task(self._receive(member, manifest, say))

    def take(self, key: VersionKey) -> Arrival | None:
        """Return the transfer of a version, in progress or done, if any; the caller then owns its files."""
        return self._arrivals.pop(key, None)

    def drop(self, key: VersionKey) -> None:
        """Discard a version that was not taken."""
        arrival = self.take(key)
        if arrival is not None:
            self._background.spawn(_discard(arrival))

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

    async def _join(self, group: pb.Group, say: Say) -> None:
        place = GroupMembership(group.backend, group.address, group.generation, group.rank, group.size, group.seconds)
        member = await GroupMember.start(place)
        # While the process started, this sampler may have left the group or been called to another generation.
        if self._generation != group.generation:
            await member.stop()
            return
        self._member = member
        try:
            await member.join()
        except errors.PeerLost as error:
            self._lost(member, error, say)
        else:
            _log.info("group joined", generation=group.generation, rank=group.rank, size=group.size)

    async def _receive(self, member: GroupMember, manifest: pb.Manifest, say: Say) -> StagedAdapter:
        refusal = self._refusal(manifest)
        directory = await asyncio.to_thread(self._staging.allocate, manifest)
        file = directory / weights_file(manifest)
        try:
            # Take part even if the version is refused: a missing member would break the broadcast for all others.
            await member.transfer(None if refusal else file, manifest.total_size)
            if refusal:
                raise refusal
            staged = StagedAdapter(manifest, directory, temporary=True)
            await staged.verify_again()
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, directory)
            if isinstance(error, errors.PeerLost):
                self._lost(member, error, say)
            raise
        return staged

    def _refusal(self, manifest: pb.Manifest) -> errors.PacelineError | None:
        try:
            self._rules.check(manifest)
        except errors.PacelineError as error:
            return error
        return None

    def _lost(self, member: GroupMember, error: errors.PeerLost, say: Say) -> None:
        """Report to the trainer, once per generation, that the group is lost."""
        if self._member is not member:
            return
        _log.warning("process group lost", generation=member.generation, reason=error.reason, error=str(error))
        self._metrics.group_losses.inc()
        self._member = None
        self._background.spawn(member.stop())
        say(pb.WatchVersionsRequest(left_group=pb.LeftGroup(generation=member.generation, reason=error.reason)))


class CollectiveBridge:
    """Takes versions that the group delivers. If this sampler joined late or the group failed, it streams them."""

    name = "collective"
    needs_volume = False

    def __init__(self, receiver: GroupReceiver, stream: StreamBridge) -> None:
        self._receiver = receiver
        self._stream = stream

    async def describe(self, ref: ModelRef, tenant: str) -> pb.Manifest:
        return await self._stream.describe(ref, tenant)

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        arrival = self._receiver.take(VersionKey(run_id=ref.run_id, version=ref.version or 0))
        if arrival is not None:
            try:
                staged = await arrival
            except (errors.PeerLost, errors.ChecksumMismatch) as error:
                _log.warning("version did not come over the group; fetching it", weights=str(ref), reason=error.reason)
            else:
                return await _checked(staged, ref, tenant)
        return await self._stream.fetch(ref, tenant)


async def _checked(staged: StagedAdapter, ref: ModelRef, tenant: str) -> StagedAdapter:
    try:
        check_is(staged.manifest, ref, tenant)
    except errors.PacelineError:
        await staged.discard()
        raise
    return staged


async def _discard(arrival: Arrival) -> None:
    """Wait for an unwanted transfer to end and remove its files; its errors are ignored."""
    (staged,) = await asyncio.gather(arrival, return_exceptions=True)
    if isinstance(staged, StagedAdapter):
        await staged.discard()
