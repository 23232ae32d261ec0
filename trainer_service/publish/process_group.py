"""The process group that broadcasts versions: the trainer's member, and the group's membership."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.background import Background
from paceline.collective import GroupMember, GroupMembership
from paceline.errors import PeerLost
from paceline.log import get_logger
from paceline.weights import weights_file
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.publish.watch_hub import Watcher, WatchHub

_FIRST_DELAY, _LAST_DELAY = 0.5, 60.0
"""Seconds until a group that failed to form is formed again: first and longest delay, doubled each time."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Settings of the group."""

    listen: str
    """host:port of the store where members rendezvous; port 0 means any free port."""
    backend: str
    seconds: float
    """How long one transfer may take."""


class BroadcastGroup:
    """Forms a new generation of the group whenever its membership changes. Without samplers there is no process.

    While there is no group, samplers fetch versions as with the bridge `stream`; nothing waits for a group.
    """

    def __init__(self, options: GroupOptions, hub: WatchHub) -> None:
        self._options = options
        self._hub = hub
        self._generation = 0
        self._member: GroupMember | None = None
        self._samplers = 0
        self._changed = asyncio.Event()
        self._refused = False
        """Whether a sampler reported that it is not in this generation."""
        self._absent: set[Watcher] = set()
        """Samplers that did not join when they were invited; they are invited again when they reconnect."""
        self._transfers = Background("broadcast failed")

    def count(self) -> int:
        """Return how many samplers are in the group."""
        return self._samplers if self._member else 0

    def changed(self, watcher: Watcher) -> None:
        """Note that a sampler started or stopped watching."""
        if watcher.joins_group:
            self._changed.set()

    def left(self, watcher: Watcher, left: pb.LeftGroup) -> None:
        """Note a sampler's report that it is not, or no longer, in the group."""
        _log.warning("sampler left the group", sampler=watcher.sampler_id, reason=left.reason)
        if left.generation == self._generation:
            if self._member is None and not self._refused:  # the others could not join because of the first
                self._absent.add(watcher)
            self._refused = True
            self._changed.set()

    def send(self, manifest: pb.Manifest, directory: Path) -> int:
        """Start broadcasting a version; return the generation to announce it with, or 0 if there is no group."""
        if self._member is None:
            return 0
        path = directory / weights_file(manifest)
        self._transfers.spawn(self._transfer(self._member, path, manifest.total_size))
        return self._member.generation

    async def run(self) -> None:
        """Form groups until cancelled."""
        delay = _FIRST_DELAY
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._regroup()
                    delay = _FIRST_DELAY
                except (PeerLost, OSError) as error:
                    _log.warning("could not form the group; retrying", error=str(error), seconds=delay)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _LAST_DELAY)
                    self._changed.set()
        finally:
            await self._end()
            await self._transfers.close()

    async def _regroup(self) -> None:
        await self._end()
        watchers = self._hub.watchers()
        self._absent &= set(watchers)
        samplers = [watcher for watcher in watchers if watcher.joins_group and watcher not in self._absent]
        if not samplers:
            return
        self._generation, self._refused = self._generation + 1, False
        options = self._options
        member = await GroupMember.start(
            GroupMembership(options.backend, options.listen, self._generation, 0, len(samplers) + 1, options.seconds)
        )
        try:
            if await self._gather(member, samplers):
                self._member, self._samplers = member, len(samplers)
                _log.info("group formed", generation=self._generation, samplers=len(samplers))
        finally:
            if self._member is not member:
                await member.stop()

    async def _gather(self, member: GroupMember, samplers: Sequence[Watcher]) -> bool:
        """Invite the samplers and wait until all joined; False if the membership changed meanwhile. Raises PeerLost."""
        port = await member.listening()
        for rank, watcher in enumerate(samplers, 1):
            watcher.outbox.put_nowait(pb.WatchVersionsResponse(group=self._invitation(rank, len(samplers) + 1, port)))
        joining, changing = asyncio.create_task(member.join()), asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({joining, changing}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
            elif self._refused:
                raise PeerLost("a sampler could not join")
            return joining.done()
        except PeerLost as error:
            missing = filter(None, error.metadata.get("missing", "").split(","))
            self._absent.update(samplers[int(rank) - 1] for rank in missing)
            raise
        finally:
            for task in (joining, changing):
                task.cancel()

    def _invitation(self, rank: int, size: int, port: int) -> pb.Group:
        host, options = self._options.listen.rpartition(":")[0], self._options
        return pb.Group(
            generation=self._generation,
            address=f"{host}:{port}",
            rank=rank,
            size=size,
            backend=options.backend,
            seconds=options.seconds,
        )

    async def _transfer(self, member: GroupMember, path: Path, size: int) -> None:
        try:
            await member.transfer(path, size)
        except PeerLost as error:
            _log.warning("broadcast failed; samplers fetch the version", error=str(error), reason=error.reason)
            if self._member is member:
                self._member = None
                self._changed.set()
            await member.stop()

    async def _end(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            await member.stop()
